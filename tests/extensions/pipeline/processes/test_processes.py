"""The pipeline in real processes over gloo: exact, and everything home again."""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from equipoise import ConfigurationError, StepError
from tests.extensions.pipeline.processes.language import Unfreezes
from tests.support.batches import SIZES, Batches
from tests.support.networks.layers import WIDTH, Task, layers
from tests.support.one_device import OPTIONS, on_one_device
from tests.support.pairs import pairwise
from tests.support.pipelines import (
    EachStep,
    Tokens,
    assert_as_on_one_device,
    assert_same,
    assert_timeline,
    fit,
    pipelined,
    processes,
    quiet,
    stay_whole,
)

pytestmark = pytest.mark.usefixtures("quick_collections")


def interleaved(stages: int, **options: Any) -> dict[str, Any]:
    return processes(stages, **{"schedule": "interleaved_1f1b", **options})


class Model(Tokens):
    """Lowers its rate with each epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class BySgd(Tokens):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


# As on one device


class KeepsTimeline(L.Callback):
    """Keeps that of the last step, as it ran."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.timeline = trainer.strategy.timeline


SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("looped_bfs", 3), ("interleaved_zero_bubble", 2)]


@pytest.mark.quick_cases(4)
@pytest.mark.thorough
@pytest.mark.parametrize(("schedule", "devices", "micro_batches"), pairwise(SCHEDULES, [2, 3], [1, 5, 13]))
def test_weights_are_those_of_one_device_with_each_schedule(
    schedule: tuple[str, int], devices: int, micro_batches: int
) -> None:
    name, each = schedule
    plan = processes(devices, schedule=name, stages_per_device=each, micro_batches=micro_batches)
    keeps = KeepsTimeline()
    assert_same(on_one_device(Model, val=(4, 13)), fit(Model, val=(4, 13), callbacks=[keeps], **plan))
    assert_timeline(keeps.timeline, name, devices, min(micro_batches, SIZES[-1]), each)


@pytest.mark.quick_cases(2)
@pytest.mark.thorough
@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "plain"])
def test_accumulated_and_clipped_gradients(options: str) -> None:
    """A norm is that of all stages."""
    assert_as_on_one_device(BySgd, processes(3, micro_batches=3), **OPTIONS[options])


class Skips(Model):
    """Leaves batches out, of which one begins a window and two are one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if (self.current_epoch, batch_idx) in ((0, 2), (1, 0), (1, 1)) else super().training_step(batch, 0)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*returned None")
def test_batches_that_are_left_out() -> None:
    assert_as_on_one_device(Skips, processes(2), accumulate_grad_batches=2, max_epochs=3, sizes=(11, 11, 3))


class Itself(BySgd):
    """Calls itself; what it computes before is trained, and goes backward last."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scaled = self.before(batch["mask"].double().unsqueeze(-1)).squeeze(-1)
        return nn.functional.cross_entropy(self(batch["tokens"], mask=scaled).flatten(0, 1), batch["tokens"].flatten())


@pytest.mark.thorough
def test_a_module_that_calls_itself_and_computes_before() -> None:
    run = assert_as_on_one_device(Itself, processes(3), gradient_clip_val=0.1)
    torch.manual_seed(7)
    assert (run.module.before.weight != Itself().double().before.weight).all()


def normalised(dropout: float = 0.0) -> Task:
    """Batch statistics and running means, in all stages."""
    parts = (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(dropout))
    return layers(*(nn.Sequential(*copy.deepcopy(parts)) for _ in range(4)))


class Counts(nn.Module):
    """Puts another tensor in the place of a buffer in every forward."""

    count: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x) + self.mean


def counting() -> Task:
    return layers(Counts(), nn.Tanh(), Counts())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "count"),
    [
        # Two epochs of three batches in two micro-batches; and evaluations, one at first.
        (normalised, lambda module: int(module.net[4][1].num_batches_tracked) == 12),
        (counting, lambda module: module.net[1].count == module.net[3].count > 12),
    ],
    ids=["changed in place", "exchanged"],
)
def test_buffers_of_all_stages_come_home(make: Any, count: Any) -> None:
    options = {"micro_batches": 2, "cut_before": ["net.3"]}
    threads, run = [fit(make, (8, 8, 8), val=[8, 8], **plan(2, **options)) for plan in (pipelined, processes)]
    assert count(run.module)
    assert_same(threads, run)


# Evaluations


@pytest.mark.thorough
@pytest.mark.parametrize("plan", [processes(3), interleaved(2)], ids=["one stage", "two stages"])
def test_evaluations_are_those_of_one_device(plan: dict[str, Any]) -> None:
    module, data = Model(), DataLoader(Batches(SIZES), batch_size=None)
    one, other = quiet(devices=1), quiet(**plan)
    for evaluate in ("validate", "test"):
        results = [getattr(run, evaluate)(module, data, verbose=False)[0] for run in (one, other)]
        assert results[1] == pytest.approx(results[0], rel=1e-12)
    for expected, actual in zip(one.predict(module, data), other.predict(module, data), strict=True):
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
        self.metrics["val"](self(batch["tokens"]).square().mean())
        self.log("val", self.metrics["val"], on_epoch=True)


@pytest.mark.thorough
def test_metrics_ask_no_other_process() -> None:
    one, other = (fit(Measured, val=[4], **plan) for plan in ({}, processes(3)))
    for name in ("mean", "val"):  # metrics compute in float32
        logged = [float(run.trainer.callback_metrics[name]) for run in (one, other)]
        assert logged[1] == pytest.approx(logged[0], rel=1e-5)
    available = MeanMetric().distributed_available_fn
    assert all(metric.distributed_available_fn is available for metric in other.module.metrics.values())


# Checkpoints

ANYWHERE = [
    ({}, interleaved(3)),
    (interleaved(3), {}),
    (interleaved(3), interleaved(2, stages_per_device=3)),
    (interleaved(3), pipelined(2)),
]


@pytest.mark.quick_cases(2)
@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after"), ANYWHERE)
def test_a_checkpoint_goes_on_anywhere(before: Any, after: Any, tmp_path: Path) -> None:
    """Written in the midst of an epoch and in the midst of a window, by three processes with two stages each."""
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    saves = {"callbacks": [EachStep(tmp_path)]}
    fit(Model, max_steps=5, **saves, **before, **options)
    written = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    assert written["state_dict"].keys() == Model().state_dict().keys()
    assert all(torch.isfinite(value).all() for value in written["state_dict"].values())
    assert len(written["optimizer_states"][0]["state"]) == len(list(Model().parameters()))
    again = fit(Model, ckpt_path=tmp_path / "step=4.ckpt", **after, **options)
    assert_same(on_one_device(Model, **options)._replace(gradients=[]), again)


@pytest.mark.slow
def test_dropout_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    plan = processes(2, cut_before=["net.3"])

    def make() -> Task:
        return normalised(dropout=0.5)

    sizes = (12, 12, 12)  # batch statistics need two samples in each micro-batch
    whole = fit(make, sizes, callbacks=[EachStep(tmp_path)], **plan)
    assert_same(whole, fit(make, sizes, ckpt_path=tmp_path / "step=2.ckpt", **plan), tolerance=0)


# Changes in the midst of a run


@pytest.mark.thorough
def test_parameters_that_are_trained_later() -> None:
    one, other = (fit(Tokens, callbacks=[Unfreezes()], max_epochs=3, **plan) for plan in ({}, processes(3)))
    torch.manual_seed(7)
    before = Tokens().double()
    assert torch.equal(one.module.net.embedding.weight, before.net.embedding.weight)
    assert not torch.equal(one.module.net.blocks[0].weight, before.net.blocks[0].weight)
    assert_same(one, other)


class Looks(L.Callback):
    """Reads the weights of another process, which is refused, and the whole, which is not."""

    def cannot_read(self, pl_module: Any) -> None:
        weight = pl_module.net.blocks[0].weight
        with pytest.raises(StepError, match=r"shape \(6, 6\), torch.float64.*by `isnan`"):
            weight.isnan()
        with pytest.raises(StepError, match="by `clone`"):
            copy.deepcopy(pl_module.net.blocks[0])
        assert (weight.shape, weight.dtype, weight.numel()) == ((6, 6), torch.float64, 36)
        assert pl_module.state_dict()["net.blocks.0.weight"].shape == (6, 6)
        assert "another process" in repr(weight)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.cannot_read(pl_module)
        assert not pl_module.net.blocks[3].weight.isnan().any()
        before = trainer.strategy.module_state(pl_module)
        assert not before["net.blocks.0.weight"].isnan().any()
        self.cannot_read(pl_module)
        if trainer.global_step == 2:
            before["net.blocks.0.weight"] = torch.full_like(before["net.blocks.0.weight"], 0.25)
            trainer.strategy.load_module_state(pl_module, before)
            after = trainer.strategy.module_state(pl_module)
            assert (after["net.blocks.0.weight"] == 0.25).all()


@pytest.mark.thorough
def test_weights_lie_with_their_stages_until_they_are_asked_for() -> None:
    run = fit(Model, callbacks=[Looks()], **processes(2, cut_before=["net.blocks.2"]))
    assert all(torch.isfinite(parameter).all() for parameter in run.module.parameters())


# Refusals


class Compresses(nn.Module):
    def forward(self, x: Tensor) -> Any:
        stay_whole(x)
        return x, x.detach().to_sparse_csr()


class Decompresses(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        stay_whole(pair[0])
        return pair[0] + pair[1].to_dense()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_tensor_that_cannot_be_sent_is_named() -> None:
    """A tensor of compressed rows passes between the stages, which no message takes."""
    with pytest.raises(StepError, match=r"cannot be sent to another process.*torch.sparse_csr.*engine='threads'"):
        fit(lambda: layers(Compresses(), Decompresses()), **processes(2, cut_before=["net.2"]))


class Beside(Model):
    """Uses a weight of the first stage in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] + self.net.blocks[0].weight.square().mean()


class Kind(nn.Parameter):
    """A class of the user's own, which the package does not replace by one that refuses to be read."""


class BesideOfAKind(Beside):
    def configure_model(self) -> None:
        self.net.blocks[0].weight = Kind(self.net.blocks[0].weight.detach())


class Keeping(Model):
    def optimizer_zero_grad(self, *args: Any) -> None:
        pass


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (Beside, StepError, "of another stage .* by `square`.*within the network's forward"),
        (BesideOfAKind, StepError, r"uses net\.blocks\.0\.weight outside .* in the process of stage 0\."),
        (Keeping, ConfigurationError, "Keeping overrides `optimizer_zero_grad`.*engine='threads'"),
    ],
)
def test_modules_that_need_what_lies_in_other_processes_are_refused(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fit(make, **processes(2, cut_before=["net.blocks.2"]))


def writes(module: Any) -> None:
    for parameter in module.parameters():
        parameter.detach().clamp_(-1, 1)


def averages(module: Any) -> None:
    torch.zeros(6, 6, dtype=torch.float64).lerp_(module.net.blocks[0].weight.detach(), 0.1)


def goes_backward(module: Any) -> None:
    features = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
    module.net(torch.ones(2, 5, dtype=torch.long), features)["logits"].sum().backward()


def reads_gradients(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.norm()


@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("hook", "act", "message"),
    [
        ("on_train_batch_end", writes, r"parameter of another stage.* written to by `clamp_`.*engine='threads'"),
        (
            "on_train_batch_end",
            averages,
            r"parameter of another stage.* read .*by `lerp_`.*module_state.*engine='threads'",
        ),
        ("on_train_epoch_end", goes_backward, "Gradients of the network are computed in `training_step` alone"),
        (
            "on_after_backward",
            reads_gradients,
            r"gradient of .* was read.* lies in another process.*engine='threads'",
        ),
    ],
)
def test_hooks_that_need_what_lies_in_other_processes_are_refused(hook: str, act: Any, message: str) -> None:
    def make() -> Model:
        module = Model()
        setattr(module, hook, lambda *args: act(module))
        return module

    with pytest.raises(StepError, match=message):
        fit(make, **processes(2, cut_before=["net.blocks.2"]))
