"""Evaluations that leave no trace in training: bitwise, exact, without a graph."""

import csv
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy, MulticlassConfusionMatrix

from equipoise import ConfigurationError, NoGradEvaluation, StepError, Trainer
from tests.support.equality import assert_equal
from tests.support.fits_with_evaluations import Plain, accuracy, made, rows, samples, trained
from tests.support.trainer_runs import trainer as quiet

both_trainers = pytest.mark.parametrize("kind", [Trainer, L.Trainer])


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("kind", "inference_mode", "options"),
    [
        (Trainer, True, {}),
        (Trainer, False, {"workers": 2}),
        (Trainer, False, {"strategy": "dp", "devices": ["cpu", "cpu"]}),
        (Trainer, True, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
        (L.Trainer, False, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
    ],
)
def test_training_goes_on_as_if_nothing_had_happened(
    kind: type[Any], inference_mode: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    alone, _ = trained(kind, None, tmp_path, **options)
    with_it, evaluation = trained(kind, inference_mode, tmp_path, **options)
    assert_equal(alone, with_it)
    per_epoch = 3 if "accumulate_grad_batches" in options else 6
    assert [result.step for result in evaluation.results] == sorted(
        {step for step in range(1, 3 * per_epoch + 1) if step % 2 == 0 or step % per_epoch == 0}
    )
    assert all(result.batches == 5 for result in evaluation.results)


def batches(count: int, size: int) -> DataLoader[Any]:
    return DataLoader(samples(count), batch_size=size)


def held_out() -> DataLoader[Any]:
    """Four batches that training does not read."""
    return batches(20, 5)


def fit(*evaluations: NoGradEvaluation, module: Plain | None = None, kind: type[Any] = Trainer, **options: Any) -> Any:
    """Train on three batches."""
    run = quiet(kind, callbacks=list(evaluations), **options)
    run.fit(module or made(), batches(12, 4))
    return run


class Counting(list[int]):
    """A sampler with another order in each epoch, which it counts."""

    epoch = 0

    def __iter__(self) -> Any:
        self.epoch += 1
        yield from torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist()


TRAINING_LOADERS: dict[str, Callable[[], dict[str, Any]]] = {
    # Which has one iterator, which is in use.
    "persistent workers": lambda: {
        "shuffle": True,
        "generator": torch.Generator().manual_seed(6),
        "num_workers": 1,
        "persistent_workers": True,
        "multiprocessing_context": "fork",
    },
    "a sampler that counts its epochs": lambda: {"sampler": Counting(range(32))},
}


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("kind", TRAINING_LOADERS)
def test_the_training_loader_can_be_evaluated(kind: str) -> None:
    def recorded(*evaluations: NoGradEvaluation, loader: Any) -> Any:
        """Return what training read in two epochs, and the weights at its end."""
        quiet(max_epochs=2, callbacks=[*evaluations]).fit(module := made(), loader)
        return module.batches, module.state_dict()

    alone, shared = (DataLoader(samples(32), batch_size=4, **TRAINING_LOADERS[kind]()) for _ in range(2))
    evaluation = NoGradEvaluation(shared, accuracy(), every_n_steps=3, limit_batches=2)
    assert_equal(recorded(loader=alone), recorded(evaluation, loader=shared))
    assert [(result.step, result.batches) for result in evaluation.results] == [(step, 2) for step in range(3, 16, 3)]


class Logging(Plain):
    """Logs in forward."""

    def forward(self, features: Tensor) -> Tensor:
        output = self.net(features)
        self.log("mean", output.mean(), on_step=True, on_epoch=True)
        self.log_dict({"least": output.min(), "most": output.max()}, on_step=False, on_epoch=True)
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


@both_trainers
def test_what_forward_logs_is_that_of_training(kind: type[Any], tmp_path: Path) -> None:
    def run(folder: Path, *evaluations: Any) -> Any:
        torch.manual_seed(3)
        options = {"logger": CSVLogger(folder), "log_every_n_steps": 1, "max_epochs": 2}
        trainer = fit(*evaluations, module=(module := Logging()), kind=kind, **options)
        assert module.log.__name__ == "log"
        return rows(trainer)

    evaluation = NoGradEvaluation(held_out(), accuracy(), every_n_steps=2)
    alone = run(tmp_path / "alone")
    assert {"mean_step", "mean_epoch", "least", "most"} <= {name for row in alone for name in row}
    assert alone == run(tmp_path / "with", evaluation)
    assert len(evaluation.results) == 3


# Values


def by_hand(module: Plain, data: TensorDataset) -> tuple[Tensor, Tensor]:
    features, labels = data.tensors
    module.eval()
    with torch.no_grad():
        predictions = module.net(features)
    module.train()
    return predictions, labels


@pytest.mark.parametrize(("kind", "inference_mode"), [(Trainer, True), (L.Trainer, False)])
def test_values_are_those_of_all_data_at_once(kind: type[Any], inference_mode: bool, tmp_path: Path) -> None:
    module, data = made(), samples(23)
    evaluation = NoGradEvaluation(
        DataLoader(data, batch_size=5), accuracy(), name="held out", at_end=True, inference_mode=inference_mode
    )
    trainer = fit(evaluation, module=module, kind=kind, logger=CSVLogger(tmp_path), max_epochs=2)
    (result,) = evaluation.results
    predictions, labels = by_hand(module, data)
    confusion = MulticlassConfusionMatrix(3)(predictions, labels)
    assert result.values["MulticlassAccuracy"] == float(MulticlassAccuracy(3)(predictions, labels))
    assert torch.equal(result.values["MulticlassConfusionMatrix"], confusion)
    assert not result.values["MulticlassConfusionMatrix"].is_inference()
    assert (result.step, result.batches, module.called) == (6, 5, [(False, False, inference_mode)] * 5)
    assert result.memory >= 0
    assert result.seconds > 0
    with open(Path(trainer.logger.log_dir, "metrics.csv")) as file:
        (row,) = [row for row in csv.DictReader(file) if any(v and "/memory" in name for name, v in row.items())]
    assert (int(row["step"]), int(row["epoch"])) == (6, result.epoch)
    assert float(row["held out/MulticlassAccuracy"]) == pytest.approx(result.values["MulticlassAccuracy"], rel=1e-6)
    assert float(row["held out/memory_MiB"]) == result.memory / 2**20
    assert "held out/MulticlassConfusionMatrix" not in row


@both_trainers
def test_callbacks_can_monitor_values(kind: type[Any], tmp_path: Path) -> None:
    """Of steps and of epochs; what they see is the latest value."""
    module, data = made(), batches(23, 5)
    steps = NoGradEvaluation(data, MulticlassAccuracy(3), name="steps", every_n_steps=2)
    epochs = NoGradEvaluation(data, MetricCollection({"acc": MulticlassAccuracy(3)}), name="epochs", every_n_epochs=2)
    best = ModelCheckpoint(tmp_path / "best", monitor="epochs/acc", mode="max", every_n_epochs=2, save_top_k=-1)
    often = ModelCheckpoint(tmp_path, monitor="steps/MulticlassAccuracy", every_n_train_steps=2, save_top_k=-1)
    stop = EarlyStopping("epochs/acc", mode="max", stopping_threshold=0.0, check_on_train_epoch_end=True, strict=False)
    callbacks = [steps, epochs, stop, best, often]
    trainer = quiet(kind, enable_checkpointing=True, max_epochs=4, callbacks=callbacks)
    trainer.fit(module, batches(12, 4))
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
        module, data = Validated(), batches(23, 5)
        evaluation = NoGradEvaluation(data, MeanSquaredError(), forward=squared, at_end=True)
        trainer = fit(evaluation, module=module, kind=kind, precision=precision)
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
        return batches(12, 4)

    def extra(self) -> Any:
        return held_out()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] * 2, batch[1])


@both_trainers
def test_a_loader_by_the_name_of_a_method_of_the_data_module_with_its_hooks(kind: type[Any]) -> None:
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
    make = Mock(side_effect=held_out)
    evaluation = NoGradEvaluation(make, MulticlassAccuracy(3))
    fit(evaluation, max_epochs=3)
    assert (make.call_count, len(evaluation.results)) == (1, 3)
    fit(evaluation)
    assert make.call_count == 2


def test_forward_may_return_arguments_by_name_and_a_metric_several_values() -> None:
    class Both(MeanMetric):
        def compute(self) -> Any:
            return {"mean": super().compute(), "twice": 2 * super().compute()}

    evaluation = NoGradEvaluation([torch.tensor([1.0, 3.0])], Both(), forward=lambda module, x: {"value": module(x)})
    assert evaluation.run(nn.Identity()).values == {"mean": 2.0, "twice": 4.0}


@both_trainers
def test_a_trial_run_takes_few_batches(kind: type[Any]) -> None:
    evaluation = NoGradEvaluation(held_out(), MulticlassAccuracy(3), every_n_steps=1)
    fit(evaluation, kind=kind, logger=None, fast_dev_run=2)
    assert [(result.step, result.batches) for result in evaluation.results] == [(1, 2), (2, 2)]


@both_trainers
def test_optimisers_that_step_together_pass_over_multiples(kind: type[Any]) -> None:
    class Manual(Plain):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

    evaluation = NoGradEvaluation(held_out(), MulticlassAccuracy(3), every_n_steps=3)
    quiet(kind, callbacks=[evaluation]).fit(Manual(), batches(24, 4))
    assert [result.step for result in evaluation.results] == [4, 6, 10, 12]


def test_a_run_after_one_that_failed_is_evaluated_from_its_start() -> None:
    evaluation = NoGradEvaluation(held_out(), every_n_epochs=1, metrics=accuracy())

    class Fails(Plain):
        def on_train_epoch_end(self) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(evaluation, module=Fails())
    fit(evaluation)
    assert [result.step for result in evaluation.results] == [3, 3]


def test_a_resumed_run_has_its_history(tmp_path: Path) -> None:
    def run(epochs: int, path: Path | None = None) -> Any:
        one = NoGradEvaluation(held_out(), accuracy(), name="one", every_n_steps=2)
        two = NoGradEvaluation(held_out(), accuracy(), name="two")
        trainer = quiet(max_epochs=epochs, callbacks=[one, two])
        trainer.fit(made(), batches(12, 4), ckpt_path=path)
        return trainer, one.results, two.results

    _, *whole = run(4)
    trainer, *_ = run(2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    _, *resumed = run(4, tmp_path / "two.ckpt")
    for one, other in zip(whole, resumed, strict=True):
        assert_equal([(r.step, r.epoch, r.values) for r in one], [(r.step, r.epoch, r.values) for r in other])
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


def test_batches_may_be_inputs_alone() -> None:
    evaluation = NoGradEvaluation([torch.ones(2, 4), torch.zeros(1, 4)], collect=True)
    evaluation.run(nn.Identity())
    assert evaluation.concatenated().tolist() == [[1.0] * 4] * 2 + [[0.0] * 4]


@pytest.mark.parametrize(("metrics", "inference_mode"), [(None, True), (BinaryAccuracy(), False)])
def test_nothing_of_a_batch_outlives_it(metrics: Any, inference_mode: bool) -> None:
    """The outputs that lie on the device; copies of them are kept."""
    alive: list[Any] = []
    most = []

    def forward(module: nn.Module, batch: Any) -> Any:
        most.append(sum(each() is not None for each in alive))
        outputs = module(batch[0])[:, 0].sigmoid(), batch[1] > 0
        alive.extend(map(weakref.ref, (*batch, *outputs)))
        return outputs

    loader = batches(40, 4)
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
    again = evaluation.run(nn.Linear(4, 3))
    assert_equal(before, metrics.compute())
    assert int(again.values["MulticlassConfusionMatrix"].sum()) == 8


# Graphs


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
        (inner, False, r"an operation saved a tensor of shape \[5, 4\]"),
        (shifted, False, r"output\[0\], of shape \[5, 4\], has grad_fn=AddBackward0"),
        (out_of_inference, True, r"an operation saved a tensor of shape \[5, 4\]"),
    ],
)
def test_a_graph_is_refused(forward: Any, inference_mode: bool, message: str) -> None:
    module = Shifts()
    module.bias.requires_grad_(False)
    evaluation = NoGradEvaluation(held_out(), MeanSquaredError(), forward=forward, inference_mode=inference_mode)
    state = torch.get_rng_state()
    with pytest.raises(StepError, match=rf"NoGradEvaluation 'eval' evaluates without gradients, but .*: {message}"):
        evaluation.run(module)
    assert module.training  # all is put back after an error, too
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled()
    assert not evaluation.results


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
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
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
def test_a_loader_is_checked_when_the_run_begins(given: Any, error: type[Exception], message: str) -> None:
    trainer = quiet(callbacks=[NoGradEvaluation(given, MulticlassAccuracy(3))])
    with pytest.raises(error, match=message):
        trainer.fit(made(), datamodule=Data())


@pytest.mark.parametrize(("batch", "told"), [(torch.ones(2, 4), "Tensor"), ([torch.ones(2, 4)] * 3, "list of 3")])
def test_a_batch_without_a_target_is_refused(batch: Any, told: str) -> None:
    with pytest.raises(StepError, match=rf"a batch must be \(inputs, target\), but it is a {told}"):
        NoGradEvaluation([batch], MeanMetric()).run(nn.Identity())


def test_what_forward_returns_is_checked() -> None:
    evaluation = NoGradEvaluation([torch.ones(2)], MeanMetric(), forward=lambda module, batch: 3)
    with pytest.raises(StepError, match=r"forward must return what the metrics are updated with.* returned a int"):
        evaluation.run(nn.Identity())
    with pytest.raises(StepError, match="has collected nothing: say collect=True"):
        evaluation.concatenated()
