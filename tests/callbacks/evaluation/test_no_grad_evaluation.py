"""Evaluations that leave no trace in training: bitwise, exact, without a graph."""

import csv
import random
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MulticlassConfusionMatrix

from equipoise import ConfigurationError, NoGradEvaluation, StepError, Trainer
from tests.support.trainer_runs import trainer as quiet


class Wild(L.LightningModule):
    """Draws from every generator in forward, in training and in evaluation; keeps a hidden state and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        self.frozen = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        self.register_buffer("calls", torch.zeros(()))
        self.generator = torch.Generator().manual_seed(3)
        self.own = numpy.random.default_rng(4)
        self.hidden: Tensor | None = None
        self.losses: list[float] = []

    def on_train_epoch_start(self) -> None:
        self.frozen.eval()

    def forward(self, features: Tensor) -> Tensor:
        noise = random.random() + numpy.random.rand() + float(torch.rand((), generator=self.generator))
        noise += float(self.own.random()) + float(torch.rand(()))
        self.calls += 1
        self.hidden = features.detach().mean() + (0 if self.hidden is None else 0.5 * self.hidden)
        output = self.net(features)
        return output + self.frozen(output) + 1e-2 * noise + 1e-3 * self.calls + 1e-2 * self.hidden

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]).float(), batch[1])
        self.losses.append(float(loss.detach()))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


class Noisy(Dataset[Any]):
    """Samples with noise that a generator of the data's own draws, as augmentation does."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self.features, self.labels = torch.randn(count, 4, generator=generator), torch.arange(count) % 3
        self.generator = numpy.random.default_rng(8)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> Any:
        return self.features[index] + 0.01 * float(self.generator.random()), self.labels[index]


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.arange(count) % 3)


def accuracy() -> MetricCollection:
    return MetricCollection([MulticlassAccuracy(3), MulticlassConfusionMatrix(3)])


def trained(
    kind: type[Any], inference_mode: bool | None, folder: Path, workers: int = 0, size: int = 4, **options: Any
) -> Any:
    """Everything that training leaves behind, with evaluations in its midst or, if None, without."""
    torch.manual_seed(1)
    random.seed(2)
    numpy.random.seed(3)
    module, data = Wild(), Noisy(24)
    shared = torch.Generator().manual_seed(5)  # of both loaders
    more: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(data, batch_size=size, shuffle=True, generator=shared)
    other = DataLoader(data, batch_size=5, shuffle=True, generator=shared, **more)
    evaluation = NoGradEvaluation(
        other,
        accuracy(),
        every_n_steps=2,
        every_n_epochs=1,
        at_end=True,
        collect=True,
        inference_mode=bool(inference_mode),
    )
    trainer = quiet(
        kind,
        logger=CSVLogger(folder, name=f"{kind.__module__}-{inference_mode}"),
        log_every_n_steps=1,
        max_epochs=3,
        callbacks=[] if inference_mode is None else [evaluation],
        **options,
    )
    trainer.fit(module, loader)
    state = {
        "weights": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict()["state"],
        "losses": module.losses,
        "hidden": module.hidden,
        "modes": [part.training for part in module.modules()],
        "drawn": (torch.rand(3), random.random(), numpy.random.rand(), torch.rand(2, generator=shared)),
        "own": (module.own.random(), data.generator.random(), torch.rand(2, generator=module.generator)),
        "logs": [row for row in rows(trainer) if row.get("loss_step") or row.get("loss_epoch")],
    }
    return state, evaluation


def rows(trainer: Any) -> list[dict[str, str]]:
    with open(Path(trainer.logger.log_dir, "metrics.csv")) as file:
        found = [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]
    return [row for row in found if not any(name.startswith("eval/") for name in row)]


def assert_same(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    else:
        assert one == other, path


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Trainer, {}),
        (Trainer, {"accumulate_grad_batches": 2}),
        (Trainer, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
        (Trainer, {"strategy": "dp", "devices": ["cpu", "cpu"]}),
        (L.Trainer, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
    ],
    ids=["plain", "accumulated", "mixed", "dp", "Lightning"],
)
@pytest.mark.parametrize("inference_mode", [False, True])
def test_training_goes_on_as_if_nothing_had_happened(
    kind: type[Any], options: dict[str, Any], inference_mode: bool, tmp_path: Path
) -> None:
    alone, _ = trained(kind, None, tmp_path, **options)
    with_it, evaluation = trained(kind, inference_mode, tmp_path, **options)
    assert_same(alone, with_it)
    per_epoch = 3 if "accumulate_grad_batches" in options else 6
    assert [result.step for result in evaluation.results] == sorted(
        {step for step in range(1, 3 * per_epoch + 1) if step % 2 == 0 or step % per_epoch == 0}
    )
    assert all(result.batches == 5 for result in evaluation.results)


def test_with_worker_processes(tmp_path: Path) -> None:
    alone, _ = trained(Trainer, None, tmp_path)
    with_it, evaluation = trained(Trainer, False, tmp_path, workers=2)
    assert_same(alone, with_it)
    assert len(evaluation.results) == 9


class Recording(L.LightningModule):
    """Notes the batches it was trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.batches = nn.Linear(4, 3), []

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch[0].clone())
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def recorded(kind: type[Any], loader: Any, evaluations: list[Any], epochs: int = 2) -> Any:
    """Return what training read, and the weights at its end."""
    torch.manual_seed(3)
    module = Recording()
    quiet(kind, max_epochs=epochs, callbacks=evaluations).fit(module, loader)
    return module.batches, module.state_dict()


@pytest.mark.parametrize("limit", [None, 2])
@pytest.mark.parametrize("kind", [Trainer, L.Trainer])
def test_the_training_loader_with_persistent_workers(kind: type[Any], limit: int | None) -> None:
    """Such a loader has one iterator, which is in use."""

    def loader() -> Any:
        generator = torch.Generator().manual_seed(6)
        workers = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
        return DataLoader(samples(32), batch_size=4, shuffle=True, generator=generator, **workers)

    alone, shared = recorded(kind, loader(), []), loader()
    evaluation = NoGradEvaluation(shared, accuracy(), every_n_steps=3, limit_batches=limit)
    assert_same(alone, recorded(kind, shared, [evaluation]))
    assert len(alone[0]) == 16
    assert [(result.step, result.batches) for result in evaluation.results] == [
        (step, limit or 8) for step in range(3, 16, 3)
    ]


class Counting:
    """A sampler with another order in each epoch, which it counts."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def __iter__(self) -> Any:
        self.epoch += 1
        yield from torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist()

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize("kind", [Trainer, L.Trainer])
def test_a_sampler_that_counts_for_itself(kind: type[Any]) -> None:
    def loaders() -> Any:
        sampler = Counting(12)
        return [DataLoader(samples(12), batch_size=size, sampler=sampler) for size in (4, 5)]

    alone, (loader, other) = recorded(kind, loaders()[0], []), loaders()
    evaluations = [
        NoGradEvaluation(each, accuracy(), name=name, every_n_steps=2) for name, each in (("a", loader), ("b", other))
    ]
    assert_same(alone, recorded(kind, loader, evaluations))
    assert loader.sampler.epoch == 2
    assert [result.batches for evaluation in evaluations for result in evaluation.results] == [3] * 6


class Logging(Recording):
    """Logs in forward."""

    def forward(self, features: Tensor) -> Tensor:
        output = self.net(features)
        self.log("mean", output.mean(), on_step=True, on_epoch=True)
        self.log_dict({"least": output.min(), "most": output.max()}, on_step=False, on_epoch=True)
        return output


@pytest.mark.parametrize("kind", [Trainer, L.Trainer])
def test_what_forward_logs_is_that_of_training(kind: type[Any], tmp_path: Path) -> None:
    def run(folder: Path, *evaluations: Any) -> Any:
        torch.manual_seed(3)
        logger = CSVLogger(folder)
        trainer = quiet(kind, logger=logger, log_every_n_steps=1, max_epochs=2, callbacks=list(evaluations))
        trainer.fit(module := Logging(), DataLoader(samples(12), batch_size=4))
        assert module.log.__name__ == "log"
        return rows(trainer)

    evaluation = NoGradEvaluation(DataLoader(samples(20), batch_size=5), accuracy(), every_n_steps=2)
    alone = run(tmp_path / "alone")
    assert {"mean_step", "mean_epoch", "least", "most"} <= {name for row in alone for name in row}
    assert alone == run(tmp_path / "with", evaluation)
    assert len(evaluation.results) == 3


# Values


class Plain(L.LightningModule):
    """A classifier that says in which mode it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 3))
        self.called: list[tuple[bool, bool, bool]] = []

    def forward(self, features: Tensor) -> Tensor:
        self.called.append((self.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        return self.net(features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def made() -> Plain:
    torch.manual_seed(7)
    return Plain()


def by_hand(module: Plain, data: TensorDataset) -> tuple[Tensor, Tensor]:
    features, labels = data.tensors
    module.eval()
    with torch.no_grad():
        predictions = module.net(features)
    module.train()
    return predictions, labels


@pytest.mark.parametrize("inference_mode", [False, True])
@pytest.mark.parametrize("kind", [Trainer, L.Trainer])
def test_values_are_those_of_all_data_at_once(kind: type[Any], inference_mode: bool, tmp_path: Path) -> None:
    module, data = made(), samples(23)
    evaluation = NoGradEvaluation(
        DataLoader(data, batch_size=5), accuracy(), name="held out", at_end=True, inference_mode=inference_mode
    )
    trainer = quiet(kind, logger=CSVLogger(tmp_path), max_epochs=2, callbacks=[evaluation])
    trainer.fit(module, DataLoader(samples(12), batch_size=4))
    (result,) = evaluation.results
    predictions, labels = by_hand(module, data)
    confusion = MulticlassConfusionMatrix(3)(predictions, labels)
    assert result.values["MulticlassAccuracy"] == float(MulticlassAccuracy(3)(predictions, labels))
    assert torch.equal(result.values["MulticlassConfusionMatrix"], confusion)
    assert not result.values["MulticlassConfusionMatrix"].is_inference()
    assert (result.step, result.batches, module.called) == (6, 5, [(False, False, inference_mode)] * 5)
    assert result.memory >= 0
    assert result.seconds > 0
    (row,) = read(trainer)
    assert (int(row["step"]), int(row["epoch"])) == (6, result.epoch)
    assert float(row["held out/MulticlassAccuracy"]) == pytest.approx(result.values["MulticlassAccuracy"], rel=1e-6)
    assert float(row["held out/memory_MiB"]) == result.memory / 2**20
    assert "held out/MulticlassConfusionMatrix" not in row


def read(trainer: Any) -> list[dict[str, str]]:
    with open(Path(trainer.logger.log_dir, "metrics.csv")) as file:
        return [row for row in csv.DictReader(file) if any(v and "/memory" in name for name, v in row.items())]


@pytest.mark.parametrize("kind", [Trainer, L.Trainer])
def test_callbacks_can_monitor_them(kind: type[Any], tmp_path: Path) -> None:
    """Of steps and of epochs; what they see is the latest value."""
    module, data = made(), DataLoader(samples(23), batch_size=5)
    steps = NoGradEvaluation(data, MulticlassAccuracy(3), name="steps", every_n_steps=2)
    epochs = NoGradEvaluation(data, MetricCollection({"acc": MulticlassAccuracy(3)}), name="epochs", every_n_epochs=2)
    best = ModelCheckpoint(tmp_path / "best", monitor="epochs/acc", mode="max", every_n_epochs=2, save_top_k=-1)
    often = ModelCheckpoint(tmp_path, monitor="steps/MulticlassAccuracy", every_n_train_steps=2, save_top_k=-1)
    stop = EarlyStopping("epochs/acc", mode="max", stopping_threshold=0.0, check_on_train_epoch_end=True, strict=False)
    callbacks = [steps, epochs, stop, best, often]
    trainer = quiet(kind, enable_checkpointing=True, max_epochs=4, callbacks=callbacks)
    trainer.fit(module, DataLoader(samples(12), batch_size=4))
    assert [result.step for result in steps.results] == [2, 4, 6]  # the epochs' first evaluation ended training
    assert [(result.step, result.epoch) for result in epochs.results] == [(6, 1)]
    assert trainer.current_epoch == 2
    assert float(trainer.callback_metrics["epochs/acc"]) == pytest.approx(epochs.results[-1].values["acc"], rel=1e-6)
    assert float(best.best_model_score) == pytest.approx(epochs.results[-1].values["acc"], rel=1e-6)
    expected = [result.values["MulticlassAccuracy"] for result in steps.results]
    assert sorted(map(float, often.best_k_models.values())) == pytest.approx(sorted(expected), rel=1e-6)


@pytest.mark.parametrize(("precision", "close"), [("bf16-mixed", 0), ("bf16-true", 2**-8), ("64-true", 0)])
def test_precision_is_that_of_the_trainers_own_evaluation(precision: Any, close: float) -> None:
    """The same values as `validate` by both trainers, to the bit; but a module's own metric is converted with it."""
    found = {}
    for kind in (Trainer, L.Trainer):
        torch.manual_seed(7)
        module, data = Validated(), DataLoader(samples(23), batch_size=5)
        evaluation = NoGradEvaluation(data, MeanSquaredError(), forward=squared, at_end=True)
        trainer = quiet(kind, precision=precision, max_epochs=1, callbacks=[evaluation])
        trainer.fit(module, DataLoader(samples(12), batch_size=4))
        trainer.validate(module, data, verbose=False)
        found[kind] = evaluation.results[0].values["MeanSquaredError"]
        assert found[kind] == pytest.approx(float(trainer.callback_metrics["error"]), rel=close, abs=0)
    assert found[Trainer] == found[L.Trainer]


class Validated(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.error(*squared(self, batch))
        self.log("error", self.error)


def squared(module: Any, batch: Any) -> Any:
    predictions = module(batch[0]).softmax(-1)
    return predictions, nn.functional.one_hot(batch[1], 3).to(predictions.dtype)


class Data(L.LightningDataModule):
    """Its batches are changed on their way by a hook."""

    def train_dataloader(self) -> Any:
        return DataLoader(samples(12), batch_size=4)

    def extra(self) -> Any:
        return DataLoader(samples(20), batch_size=5)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] * 2, batch[1])


@pytest.mark.parametrize("kind", [Trainer, L.Trainer])
def test_a_method_of_the_data_module_and_its_hooks(kind: type[Any]) -> None:
    evaluation = NoGradEvaluation("extra", MulticlassAccuracy(3), at_end=True, limit_batches=3, collect=True)
    module = made()
    quiet(kind, callbacks=[evaluation]).fit(module, datamodule=Data())
    assert evaluation.results[0].batches == 3
    features, labels = samples(20).tensors
    predictions, _ = by_hand(module, TensorDataset(features[:15] * 2, labels[:15]))
    together, targets = evaluation.concatenated()
    torch.testing.assert_close(together, predictions)
    assert torch.equal(targets, labels[:15])


def test_a_function_is_called_once_in_a_run() -> None:
    calls = []

    def make() -> Any:
        calls.append(1)
        return DataLoader(samples(20), batch_size=5)

    evaluation = NoGradEvaluation(make, MulticlassAccuracy(3))
    trainer = quiet(max_epochs=3, callbacks=[evaluation])
    trainer.fit(made(), DataLoader(samples(12), batch_size=4))
    assert (len(calls), len(evaluation.results)) == (1, 3)
    trainer.fit_loop.max_epochs = 4
    trainer.fit(made(), DataLoader(samples(12), batch_size=4))
    assert len(calls) == 2


def test_a_mapping_of_arguments_and_values_of_several_names() -> None:
    class Both(MeanMetric):
        def compute(self) -> Any:
            return {"mean": super().compute(), "twice": 2 * super().compute()}

    evaluation = NoGradEvaluation([torch.tensor([1.0, 3.0])], Both(), forward=lambda module, x: {"value": module(x)})
    assert evaluation.run(nn.Identity()).values == {"mean": 2.0, "twice": 4.0}


@pytest.mark.parametrize("kind", [Trainer, L.Trainer])
def test_a_trial_run_takes_few_batches(kind: type[Any]) -> None:
    evaluation = NoGradEvaluation(DataLoader(samples(20), batch_size=5), MulticlassAccuracy(3), every_n_steps=1)
    quiet(kind, logger=None, fast_dev_run=2, callbacks=[evaluation]).fit(made(), DataLoader(samples(12), batch_size=4))
    assert [(result.step, result.batches) for result in evaluation.results] == [(1, 2), (2, 2)]


@pytest.mark.parametrize("kind", [Trainer, L.Trainer])
def test_optimisers_that_step_together_pass_over_multiples(kind: type[Any]) -> None:
    class Manual(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    evaluation = NoGradEvaluation(DataLoader(samples(20), batch_size=5), MulticlassAccuracy(3), every_n_steps=3)
    quiet(kind, callbacks=[evaluation]).fit(Manual(), DataLoader(samples(24), batch_size=4))
    assert [result.step for result in evaluation.results] == [4, 6, 10, 12]


def test_a_resumed_run_has_its_history(tmp_path: Path) -> None:
    def run(epochs: int, path: Path | None = None) -> Any:
        one = NoGradEvaluation(DataLoader(samples(20), batch_size=5), accuracy(), name="one", every_n_steps=2)
        two = NoGradEvaluation(DataLoader(samples(20), batch_size=5), accuracy(), name="two")
        trainer = quiet(max_epochs=epochs, callbacks=[one, two])
        trainer.fit(made(), DataLoader(samples(12), batch_size=4), ckpt_path=path)
        return trainer, one.results, two.results

    _, *whole = run(4)
    trainer, *_ = run(2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    _, *resumed = run(4, tmp_path / "two.ckpt")
    for one, other in zip(whole, resumed, strict=True):
        assert_same([(r.step, r.epoch, r.values) for r in one], [(r.step, r.epoch, r.values) for r in other])
    loaded = torch.load(tmp_path / "two.ckpt", weights_only=True)
    assert len(loaded["callbacks"]["NoGradEvaluation('two')"]["results"]) == 2


# Features


@pytest.mark.parametrize("inference_mode", [False, True])
def test_features_without_a_trainer(inference_mode: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout())
    module[2].eval()
    data = samples(11)
    evaluation = NoGradEvaluation(
        DataLoader(data, batch_size=4),
        forward=lambda module, batch: {"features": module(batch[0]), "labels": batch[1]},
        collect=True,
        inference_mode=inference_mode,
    )
    result = evaluation.run(module)
    assert (result.values, result.batches, [out["labels"].numel() for out in evaluation.outputs]) == ({}, 3, [4, 4, 3])
    assert [part.training for part in module] == [True, True, False]
    found = evaluation.concatenated()
    module.eval()
    torch.testing.assert_close(found["features"], module(data.tensors[0]).detach())
    assert torch.equal(found["labels"], data.tensors[1])
    head = nn.Linear(3, 1)
    head(found["features"]).sum().backward()  # nothing of inference mode is left in them
    assert head.weight.grad is not None


def test_inputs_alone() -> None:
    evaluation = NoGradEvaluation([torch.ones(2, 4), torch.zeros(1, 4)], collect=True)
    evaluation.run(nn.Identity())
    assert evaluation.concatenated().tolist() == [[1.0] * 4] * 2 + [[0.0] * 4]


@pytest.mark.parametrize("metrics", [None, BinaryAccuracy()])
@pytest.mark.parametrize("inference_mode", [False, True])
def test_nothing_of_a_batch_outlives_it(metrics: Any, inference_mode: bool) -> None:
    """The outputs that lie on the device; copies of them are kept."""
    alive: list[Any] = []
    most = []

    def forward(module: nn.Module, batch: Any) -> Any:
        most.append(sum(each() is not None for each in alive))
        outputs = module(batch[0])[:, 0].sigmoid(), batch[1] > 0
        alive.extend(map(weakref.ref, (*batch, *outputs)))
        return outputs

    loader = DataLoader(samples(40), batch_size=4)
    evaluation = NoGradEvaluation(loader, metrics, forward=forward, collect=True, inference_mode=inference_mode)
    evaluation.run(nn.Linear(4, 3))
    assert most == [0] * 10
    assert len(evaluation.outputs) == 10


def test_the_metrics_that_were_given_are_left_alone() -> None:
    metrics = accuracy()
    data = samples(8)
    metrics.update(torch.eye(3), torch.arange(3))
    before = metrics.compute()
    evaluation = NoGradEvaluation(DataLoader(data, batch_size=4), metrics)
    evaluation.run(nn.Linear(4, 3))
    assert_same(before, metrics.compute())
    again = evaluation.run(nn.Linear(4, 3))
    assert int(again.values["MulticlassConfusionMatrix"].sum()) == 8


# Graphs


def with_graph(module: nn.Module, batch: Any) -> Any:
    with torch.enable_grad():
        return module(batch[0]).sum(-1), batch[1].float()


def shifted(module: Any, batch: Any) -> Any:
    with torch.enable_grad():  # an addition saves nothing
        return module.shift + batch[0], batch[0]


def inner(module: nn.Module, batch: Any) -> Any:
    with torch.enable_grad():
        return module(batch[0]).square().sum(-1).detach(), batch[1].float()


def out_of_inference(module: nn.Module, batch: Any) -> Any:
    with torch.inference_mode(False), torch.enable_grad():
        return module(batch[0].clone()).sum(-1), batch[1].float()


class Shifts(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.shift = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("forward", "inference_mode", "message"),
    [
        (with_graph, False, r"an operation saved a tensor of shape \[5, 4\]"),
        (inner, False, r"an operation saved a tensor of shape \[5, 4\]"),
        (shifted, False, r"output\[0\], of shape \[5, 4\], has grad_fn=AddBackward0"),
        (out_of_inference, True, r"an operation saved a tensor of shape \[5, 4\]"),
    ],
)
def test_a_graph_is_an_error(forward: Any, inference_mode: bool, message: str) -> None:
    module = Shifts()
    module.bias.requires_grad_(False)
    evaluation = NoGradEvaluation(
        DataLoader(samples(20), batch_size=5), MeanSquaredError(), forward=forward, inference_mode=inference_mode
    )
    state = torch.get_rng_state()
    with pytest.raises(StepError, match=rf"NoGradEvaluation 'eval' evaluates without gradients, but .*: {message}"):
        evaluation.run(module)
    assert module.training  # all is put back after an error, too
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert not evaluation.results


def test_gradients_of_an_unfinished_window_are_left_alone() -> None:
    seen = []

    class Watching(Plain):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])
            evaluation.run(self)
            assert_same(seen[-1], [p.grad for p in self.parameters()])

    evaluation = NoGradEvaluation(DataLoader(samples(20), batch_size=5), accuracy())
    module = Watching()
    quiet(accumulate_grad_batches=3).fit(module, DataLoader(samples(12), batch_size=4))
    assert len(seen) == 3
    assert all(gradient is not None for gradient in seen[0])


# Mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": None}, "There is nothing to evaluate: give metrics, or collect=True"),
        ({"metrics": [MeanMetric()]}, r"Metric or MetricCollection, not a list.*MetricCollection"),
        ({"name": ""}, "it is a text, not ''"),
        ({"every_n_steps": 0}, "every_n_steps must be an integer of at least 1, or None, not 0"),
        ({"every_n_epochs": True}, "every_n_epochs must be an integer of at least 1, or None, not True"),
        ({"limit_batches": 1.5}, "limit_batches must be an integer of at least 1, or None, not 1.5"),
        ({"forward": 3}, "forward is a function of module and batch, not 3"),
        ({"dataloader": 3}, "an iterable of batches; it is 3"),
        ({"dataloader": iter([1])}, "a list_iterator, which can be read only once"),
        ({"dataloader": {"a": []}}, "must be one loader, not a dict of them"),
        ({"dataloader": [DataLoader(samples(2))]}, "must be one loader, not a list of them"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        NoGradEvaluation(**{"dataloader": [], "metrics": MeanMetric(), **options})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("nowhere", ConfigurationError, "'nowhere' names a method that returns a loader, but Data and Plain have none"),
        ("val_dataloader", ConfigurationError, "'val_dataloader' names a method"),  # Lightning's own, which raises
        (lambda: iter([]), ConfigurationError, "The function given as dataloader is a list_iterator, which can be"),
        ([], StepError, "the loader gave no batch"),
    ],
)
def test_what_only_a_run_can_tell(given: Any, error: type[Exception], message: str) -> None:
    trainer = quiet(callbacks=[NoGradEvaluation(given, MulticlassAccuracy(3))])
    with pytest.raises(error, match=message):
        trainer.fit(made(), datamodule=Data())


@pytest.mark.parametrize(
    ("batch", "told"), [(torch.ones(2, 4), "Tensor"), ([torch.ones(2, 4)] * 3, "list of 3"), ({}, "dict of 0")]
)
def test_what_a_batch_must_be(batch: Any, told: str) -> None:
    with pytest.raises(StepError, match=rf"a batch must be \(inputs, target\), but it is a {told}"):
        NoGradEvaluation([batch], MeanMetric()).run(nn.Identity())


def test_what_forward_must_return() -> None:
    evaluation = NoGradEvaluation([torch.ones(2)], MeanMetric(), forward=lambda module, batch: 3)
    with pytest.raises(StepError, match=r"forward must return what the metrics are updated with.* returned a int"):
        evaluation.run(nn.Identity())
    with pytest.raises(StepError, match="has collected nothing: say collect=True"):
        evaluation.concatenated()


def test_a_metric_that_needs_all_its_states() -> None:
    torch.manual_seed(3)
    x, y = torch.randn(12), torch.randn(12)
    batches = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 12, 4)]
    result = NoGradEvaluation(batches, PearsonCorrCoef()).run(nn.Identity())
    expected = float(torch.corrcoef(torch.stack([x, y]))[0, 1])
    assert result.values["PearsonCorrCoef"] == pytest.approx(expected, abs=1e-6)
