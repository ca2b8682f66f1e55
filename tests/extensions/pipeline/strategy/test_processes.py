"""The pipeline in real processes over gloo: exact, and everything home again."""

import copy
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from equipoise import Callback, ConfigurationError, OOMRecovery, PipelineStrategy, StepError, Trainer
from equipoise.extensions.pipeline.schedule.schedule import actions_of
from tests.support.pairs import pairwise
from tests.support.pipelines import stay_whole

pytestmark = pytest.mark.usefixtures("quick_collections")

WORDS, WIDTH = 19, 8
SIZES = (13, 13, 5)  # of the batches


class Block(nn.Module):
    """Takes and returns what passes, and a skip connection that passes by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, skip = pair
        return self.norm(hidden + torch.tanh(self.linear(hidden))), skip


class Language(nn.Module):
    """Tied weights at both ends, a skip connection over all, tuples between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        embedded = self.embedding(words)
        hidden, skip = self.blocks((embedded * mask.unsqueeze(-1), embedded))
        return self.out(hidden + skip)


class Model(L.LightningModule):
    """Counts tokens that are not masked."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net, self.optimizer = Language(), optimizer

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        words, labels, mask = batch
        losses = nn.functional.cross_entropy(self.net(words, mask).flatten(0, 1), labels.flatten(), reduction="none")
        return (losses * mask.flatten()).sum() / mask.sum(), mask.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, weight = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "loss_weight": weight}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, weight = self.loss(batch)
        self.log("val", loss, batch_size=int(weight))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0], batch[2]).argmax(-1)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def data(sizes: tuple[int, ...] = SIZES) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(5)
    batches = []
    for size in sizes:
        words, labels = (torch.randint(WORDS, (size, 6), generator=draw) for _ in range(2))
        mask = (torch.arange(6) < torch.randint(1, 7, (size, 1), generator=draw)).double()
        batches.append((words, labels, mask))
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def processes(**options: Any) -> PipelineStrategy:
    return PipelineStrategy(**{"engine": "processes", "timeout": 60.0, "cut_before": None, **options})


def looped(each: int = 2, **options: Any) -> PipelineStrategy:
    return processes(**{"schedule": "interleaved_1f1b", "stages_per_device": each, **options})


def make_trainer(strategy: Any, devices: int = 2, **options: Any) -> Trainer:
    keeps = any(isinstance(callback, ModelCheckpoint) for callback in options.get("callbacks", ()))
    given = {"max_epochs": 2, "logger": False, "enable_checkpointing": keeps, "precision": "64-true", **options}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        strategy=strategy, devices=["cpu"] * (1 if strategy == "single_device" else devices), **quiet, **given
    )


def fit(make: Callable[[], Any], strategy: Any, devices: int = 2, *, ckpt_path: Any = None, **options: Any) -> Any:
    module, trainer = make(), make_trainer(strategy, devices, **options)
    trainer.fit(module, data(), data((4, 13)), ckpt_path=ckpt_path)
    return module, trainer


@cache
def on_one_device() -> Any:
    """The run that others are compared with, made once."""
    return fit(Model, "single_device")


def same(one: Any, other: Any, tolerance: float = 1e-12) -> None:
    """Weights, states of optimisers and logged values."""
    for (name, expected), actual in zip(one[0].state_dict().items(), other[0].state_dict().values(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=name)
    for expected, actual in zip(one[1].optimizers, other[1].optimizers, strict=True):
        same_states(expected.state_dict(), actual.state_dict(), tolerance)
    values = {name: float(value) for name, value in other[1].callback_metrics.items()}
    assert values == pytest.approx({name: float(value) for name, value in one[1].callback_metrics.items()}, rel=1e-11)


def same_states(expected: Any, actual: Any, tolerance: float) -> None:
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys()
        for key, value in expected.items():
            same_states(value, actual[key], tolerance)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=tolerance)
    elif isinstance(expected, list):
        for one, other in zip(expected, actual, strict=True):
            same_states(one, other, tolerance)


# The first promise


class LooksAtTimeline(L.Callback):
    """Compares the last step as it ran, in the process that leads, with what was to be done."""

    def __init__(self, plan: tuple[Any, int, int, int]) -> None:
        self.plan = plan

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        timeline, (schedule, devices, micro_batches, each) = trainer.strategy.timeline, self.plan
        assert (timeline.devices, timeline.stages) == (devices, devices * each)
        for device in range(devices):
            own = [(span.stage, span.action) for span in timeline.spans if span.stage % devices == device]
            assert own == actions_of(schedule, device, devices, micro_batches, each)


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("looped_bfs", 3), ("interleaved_zero_bubble", 2)]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("schedule", "devices", "micro_batches"), pairwise(SCHEDULES, [2, 3], [1, 2, 5, 13]))
def test_weights_are_those_of_one_device(schedule: tuple[str, int], devices: int, micro_batches: int) -> None:
    name, each = schedule
    strategy = processes(schedule=name, stages_per_device=each, micro_batches=micro_batches)
    looks = LooksAtTimeline((name, devices, min(micro_batches, SIZES[-1]), each))
    same(on_one_device(), fit(Model, strategy, devices, callbacks=[looks]))


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated and clipped by value": {
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.01,
        "gradient_clip_algorithm": "value",
    },
}


@pytest.mark.parametrize("options", OPTIONS)
def test_with_options(options: str) -> None:
    def make() -> Model:
        return Model("sgd")

    one = fit(make, "single_device", **OPTIONS[options])
    same(one, fit(make, processes(micro_batches=3), 3, **OPTIONS[options]))


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (3, {"cut_before": ["net.blocks.1", "net.blocks.3"]}),
        (2, {"cut_before": ["net.blocks.0", "net.blocks.1", "net.blocks.3"], "schedule": "interleaved_1f1b"}),
    ],
)
def test_both_engines_are_one(devices: int, options: dict[str, Any]) -> None:
    """To the bit, though norms and shared gradients are put together from several processes."""
    runs = [
        fit(Model, PipelineStrategy(engine=engine, micro_batches=4, **options), devices, gradient_clip_val=0.05)
        for engine in ("threads", "processes")
    ]
    same(*runs, tolerance=1e-15)


class Skips(Model):
    """Leaves batches out, of which one begins a window and two are one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if (self.current_epoch, batch_idx) in ((0, 2), (1, 0), (1, 1)) else super().training_step(batch, 0)


@pytest.mark.filterwarnings("ignore:.*returned None")
def test_batches_that_are_left_out() -> None:
    one = fit(Skips, "single_device", accumulate_grad_batches=2, max_epochs=3)
    same(one, fit(Skips, processes(), 2, accumulate_grad_batches=2, max_epochs=3))


class Itself(Model):
    """Calls itself; what it computes before is trained, and goes backward last."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.before = nn.Linear(1, 1)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        return self.net(words, mask)

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        words, labels, mask = batch
        scaled = self.before(mask.unsqueeze(-1)).squeeze(-1)
        losses = nn.functional.cross_entropy(self(words, mask=scaled).flatten(0, 1), labels.flatten())
        return losses, torch.tensor(float(len(words)))


def test_a_module_that_calls_itself_and_computes_before() -> None:
    one = fit(Itself, "single_device", gradient_clip_val=0.1)
    assert (one[0].before.weight != Itself().double().before.weight).all()
    same(one, fit(Itself, processes(), 3, gradient_clip_val=0.1))


class Normalised(L.LightningModule):
    """Batch statistics and running means, in all stages."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(dropout)) for _ in range(4)]
        self.net = nn.Sequential(*layers, nn.Linear(5, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def features(*, shuffle: bool = False) -> DataLoader[Any]:
    samples = torch.randn(24, 5, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(samples), batch_size=8, shuffle=shuffle)


def fit_features(
    make: Callable[[], Any], strategy: Any, devices: int = 2, *, ckpt_path: Any = None, **more: Any
) -> Any:
    module, trainer = make(), make_trainer(strategy, devices, **more)
    trainer.fit(module, features(shuffle=True), features(), ckpt_path=ckpt_path)
    return module, trainer


def test_buffers_of_all_stages_come_home() -> None:
    runs = [
        fit_features(Normalised, PipelineStrategy(engine=engine, micro_batches=2, cut_before=["net.2"]))
        for engine in ("threads", "processes")
    ]
    assert int(runs[1][0].net[0][1].num_batches_tracked) == 12
    same(*runs)


class Counts(nn.Module):
    """Puts another tensor in the place of a buffer in every forward."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x) + self.mean


class Counting(Normalised):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(Counts(), nn.Tanh(), Counts(), nn.Linear(5, 1))


def test_buffers_that_are_exchanged_come_home() -> None:
    """Three epochs of three batches in two micro-batches, and of evaluations of three batches, one at first."""
    runs = [
        fit_features(Counting, PipelineStrategy(engine=engine, micro_batches=2, cut_before=["net.2"]), max_epochs=3)
        for engine in ("threads", "processes")
    ]
    assert runs[1][0].net[0].count == runs[1][0].net[2].count > 20
    same(*runs)


class Clamps(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.clamp_(-1, 1)


def test_writing_to_parameters_of_other_stages_is_refused() -> None:
    with pytest.raises(StepError, match=r"parameter of another stage.* written to by `clamp_`.*engine='threads'"):
        fit_features(Normalised, PipelineStrategy(engine="processes", cut_before=["net.2"]), callbacks=[Clamps()])


class MeanTeacher(Normalised):
    """Follows its network slowly, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                old.lerp_(new, 0.1)


def test_reading_parameters_of_other_stages_is_refused() -> None:
    with pytest.raises(
        StepError, match=r"parameter of another stage.* read .*by `lerp_`.*module_state.*engine='threads'"
    ):
        fit_features(MeanTeacher, PipelineStrategy(engine="processes", cut_before=["net.2"]))


# Evaluations


@pytest.mark.parametrize(("strategy", "devices"), [(processes, 3), (looped, 2)])
def test_evaluations(strategy: Callable[[], Any], devices: int) -> None:
    module = Model()
    one, other = make_trainer("single_device"), make_trainer(strategy(), devices)
    assert other.validate(module, data(), verbose=False)[0] == pytest.approx(
        one.validate(module, data(), verbose=False)[0], rel=1e-12
    )
    assert other.test(module, data(), verbose=False)[0] == pytest.approx(
        one.test(module, data(), verbose=False)[0], rel=1e-12
    )
    predicted = other.predict(module, data())
    assert predicted is not None
    for actual, expected in zip(predicted, one.predict(module, data()) or [], strict=True):
        assert torch.equal(actual, expected)


class Measured(Model):
    """Metrics of torchmetrics, which would ask the other processes, that compute none."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict({stage: MeanMetric() for stage in ("fit", "val")})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.metrics["fit"](result["loss"], result["loss_weight"])
        self.log("mean", self.metrics["fit"], on_step=False, on_epoch=True)
        return result

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metrics["val"](*self.loss(batch))
        self.log("val", self.metrics["val"], on_epoch=True)


def test_metrics_ask_nobody_else() -> None:
    one, other = fit(Measured, "single_device"), fit(Measured, processes(timeout=300.0), 3)
    for name in ("mean", "val"):  # metrics compute in float32
        assert float(other[1].callback_metrics[name]) == pytest.approx(float(one[1].callback_metrics[name]), rel=1e-5)
    available = MeanMetric().distributed_available_fn
    assert all(metric.distributed_available_fn is available for metric in other[0].metrics.values())


# Checkpoints


def checkpoints(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=1, filename="{step}")


ANYWHERE: list[tuple[Callable[[], Any], int]] = [
    (lambda: "single_device", 1),
    (processes, 2),
    (processes, 3),
    (lambda: looped(schedule="looped_bfs"), 2),
    (lambda: looped(3), 2),
    (PipelineStrategy, 2),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("strategy", "devices"), ANYWHERE)
def test_a_checkpoint_goes_on_anywhere(strategy: Callable[[], Any], devices: int, tmp_path: Path) -> None:
    """Written in the midst of an epoch and in the midst of a window, by three processes with two stages each."""
    whole = fit(Model, "single_device", accumulate_grad_batches=2)
    fit(Model, looped(), 3, accumulate_grad_batches=2, callbacks=[checkpoints(tmp_path)], max_steps=3)
    written = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert written["state_dict"].keys() == Model().state_dict().keys()
    assert all(torch.isfinite(value).all() for value in written["state_dict"].values())
    assert len(written["optimizer_states"][0]["state"]) == len(list(Model().parameters()))
    again = {"callbacks": [checkpoints(tmp_path)], "ckpt_path": tmp_path / "step=3.ckpt"}
    same(whole, fit(Model, strategy(), devices, accumulate_grad_batches=2, **again))


def test_one_device_s_checkpoint_goes_on_in_processes(tmp_path: Path) -> None:
    whole = on_one_device()
    fit(Model, "single_device", callbacks=[checkpoints(tmp_path)], max_steps=2)
    again = {"callbacks": [checkpoints(tmp_path)], "ckpt_path": tmp_path / "step=2.ckpt"}
    same(whole, fit(Model, processes(), 3, **again))


@pytest.mark.slow
def test_dropout_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def make() -> Normalised:
        torch.manual_seed(8)
        return Normalised(dropout=0.5)

    cut = ["net.2"]
    whole = fit_features(make, processes(cut_before=cut))
    again = fit_features(make, processes(cut_before=cut))
    same(whole, again, tolerance=0)
    fit_features(make, processes(cut_before=cut), callbacks=[checkpoints(tmp_path)], max_steps=2)
    again = {"callbacks": [checkpoints(tmp_path)], "ckpt_path": tmp_path / "step=2.ckpt"}
    same(whole, fit_features(make, processes(cut_before=cut), **again), tolerance=0)


# What changes in the midst of a run


class Unfreezes(BaseFinetuning):
    """Trains the last block at first, then all: parameters are added to the optimiser."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.embedding, *pl_module.net.blocks[:3]])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(list(pl_module.net.blocks[:3]), optimizer, lr=0.01)


class Partly(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(filter(lambda parameter: parameter.requires_grad, self.parameters()), lr=0.02)


def test_parameters_that_are_trained_later() -> None:
    one = fit(Partly, "single_device", callbacks=[Unfreezes()], max_epochs=3)
    before = dict(Partly().double().named_parameters())
    assert torch.equal(one[0].net.embedding.weight, before["net.embedding.weight"])
    assert not torch.equal(one[0].net.blocks[0].linear.weight, before["net.blocks.0.linear.weight"])
    same(one, fit(Partly, processes(), 3, callbacks=[Unfreezes()], max_epochs=3))


class Looks(L.Callback):
    """Reads the weights of another process, which is refused, and the whole, which is not."""

    def cannot_read(self, pl_module: Any) -> None:
        weight = pl_module.net.blocks[0].linear.weight
        with pytest.raises(StepError, match=r"shape \(8, 8\), torch.float64.*by `isnan`"):
            weight.isnan()
        with pytest.raises(StepError, match="by `clone`"):
            copy.deepcopy(pl_module.net.blocks[0])
        assert (weight.shape, weight.dtype, weight.numel()) == ((8, 8), torch.float64, 64)
        assert pl_module.state_dict()["net.blocks.0.linear.weight"].shape == (8, 8)
        assert "another process" in repr(weight)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.cannot_read(pl_module)
        assert not pl_module.net.blocks[3].linear.weight.isnan().any()
        before = trainer.strategy.module_state(pl_module)
        assert not before["net.blocks.0.linear.weight"].isnan().any()
        self.cannot_read(pl_module)
        if trainer.global_step == 2:
            before["net.blocks.0.linear.weight"] = torch.full_like(before["net.blocks.0.linear.weight"], 0.25)
            trainer.strategy.load_module_state(pl_module, before)
            after = trainer.strategy.module_state(pl_module)
            assert (after["net.blocks.0.linear.weight"] == 0.25).all()


def test_weights_lie_with_their_stages_until_they_are_asked_for() -> None:
    module, _ = fit(Model, processes(cut_before=["net.blocks.2"]), callbacks=[Looks()])
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())


# Memory


class Heavy(nn.Module):
    """Runs out of memory with more than two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, value: Tensor) -> Tensor:
        if self.training and len(value) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.norm(self.linear(value))


class Hungry(Normalised):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Heavy(), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1))


@pytest.mark.filterwarnings("ignore:.*memory")
def test_a_step_that_does_not_fit_in_another_process_is_done_again() -> None:
    cut = ["net.2"]
    direct = fit_features(Hungry, processes(micro_batches=4, cut_before=cut), num_sanity_val_steps=0)
    split = processes(micro_batches=1, cut_before=cut)
    same(direct, fit_features(Hungry, split, callbacks=[OOMRecovery()], num_sanity_val_steps=0))


# What cannot be


class Beside(Model):
    """Uses a weight of the first stage in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss(batch)
        return loss + self.net.blocks[0].linear.weight.square().mean()


class WithGradient(Model):
    """Asks for gradients of a call outside of the training step."""

    def on_train_epoch_end(self) -> None:
        words, _, mask = next(iter(data()))
        mask = mask.clone().requires_grad_()
        self.net(words, mask).sum().backward()


class Secret(nn.Module):
    def forward(self, words: Tensor, mask: Tensor) -> Any:
        stay_whole(words)
        return words, mask, threading.Lock()


class Unpack(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, passed: Any) -> Any:
        stay_whole(passed)
        return self.inner(*passed[:2])


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.secret, self.unpack = Secret(), Unpack(inner)

    def forward(self, words: Tensor, mask: Tensor) -> Any:
        return self.unpack(self.secret(words, mask))


class HandsOnLocks(Model):
    """Its stages exchange what no process can be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Wrapped(self.net)


class Sparse(nn.Module):
    def forward(self, mask: Tensor) -> Tensor:
        stay_whole(mask)
        return mask.to_sparse_csr()


class Dense(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, words: Tensor, mask: Tensor) -> Any:
        stay_whole(words)
        return self.inner(words, mask.to_dense())


class SparseBetween(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.sparse, self.dense = Sparse(), Dense(inner)

    def forward(self, words: Tensor, mask: Tensor) -> Any:
        return self.dense(words, self.sparse(mask))


class HandsOnSparse(Model):
    """A tensor of compressed rows passes between its stages, which no message takes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = SparseBetween(self.net)


class Keeping(Model):
    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


def test_what_no_process_can_be_sent_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Secret returns a lock, which may change"):
        fit(HandsOnLocks, processes(cut_before=["net.unpack"]))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_tensor_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(StepError, match=r"cannot be sent to another process.*torch.sparse_csr.*engine='threads'"):
        fit(HandsOnSparse, processes(cut_before=["net.dense"]), num_sanity_val_steps=0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (Beside, StepError, "of another stage .* by `square`.*within the network's forward"),
        (WithGradient, StepError, "Gradients of the network are computed in `training_step` alone"),
        (Keeping, ConfigurationError, "Keeping overrides `optimizer_zero_grad`.*engine='threads'"),
    ],
)
def test_what_is_refused_in_the_run(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fit(make, processes(cut_before=["net.blocks.2"]), num_sanity_val_steps=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "process"}, "engine must be 'threads' or 'processes', not 'process'"),
        ({"threads": True}, "threads are for engine='threads'"),
        ({"timeout": 0}, "timeout is a positive number of seconds"),
    ],
)
def test_what_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        processes(**options)


# Gradients in hooks


class Halving(L.LightningModule):
    """Halves all gradients in a hook, after it has noted them."""

    def __init__(self, hook: str = "on_after_backward") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.seen: list[list[Any]] = []
        setattr(self, hook, self.halve)

    def halve(self, *arguments: Any) -> None:
        self.seen.append([parameter.grad for parameter in self.parameters()])
        # Parts of a pipeline lie on several devices.
        self.seen[-1] = [gradient.cpu().clone() for gradient in self.seen[-1]]
        for parameter in self.parameters():
            parameter.grad.mul_(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_halving(strategy: Any, hook: str = "on_after_backward", **options: Any) -> Halving:
    module = Halving(hook)
    samples = torch.randn(10, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    make_trainer(strategy, **options).fit(module, DataLoader(TensorDataset(samples), batch_size=4))
    return module


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
def test_a_hook_after_the_backward_sees_the_gradients_of_one_device_once(window: int, schedule: str) -> None:
    expected = fit_halving("single_device", accumulate_grad_batches=window)
    strategy = PipelineStrategy(micro_batches=2, schedule=schedule)
    actual = fit_halving(strategy, accumulate_grad_batches=window)
    assert len(actual.seen) == len(expected.seen) == 6
    torch.testing.assert_close(actual.seen, expected.seen, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hook", ["on_after_backward", "on_before_zero_grad", "on_train_batch_end"])
def test_a_hook_that_reads_gradients_of_other_processes_is_refused(hook: str) -> None:
    with pytest.raises(StepError, match=r"gradient of .* was read.* lies in another process.*engine='threads'"):
        fit_halving(PipelineStrategy(engine="processes", micro_batches=2), hook)
