"""Replicas of a pipeline train as one device does on all samples of a step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric

from equipoise import ConfigurationError, OOMRecovery, StepError, WorkerError
from tests.extensions.pipeline.processes.language import STEP, Counted, samples
from tests.extensions.pipeline.processes.programs import SCRIPT, Faulty, nobody_is_left
from tests.strategies.programs import torchrun
from tests.support.equality import assert_equal
from tests.support.failures import Mistake, is_killed, raises
from tests.support.one_device import Run
from tests.support.pipelines import EachStep, assert_same, processes, quiet, stay_whole

pytestmark = pytest.mark.usefixtures("quick_collections")


def pipeline(devices: int = 4, replicas: int = 2, **options: Any) -> dict[str, Any]:
    return processes(devices, replicas=replicas, **options)


def fit(
    make: Callable[[], L.LightningModule],
    plan: dict[str, Any],
    data: Dataset[Any],
    batch_size: int,
    *,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Run:
    """Train with batches of the same samples in each replica, and validate with them."""
    torch.manual_seed(3)
    trainer, module = quiet(**{"max_epochs": 2, **plan, **options}), make()
    trainer.fit(module, DataLoader(data, batch_size), DataLoader(data, batch_size), ckpt_path=ckpt_path)
    return Run(module, [], trainer)


def fit_tokens(plan: dict[str, Any], count: int, replicas: int = 2, **options: Any) -> Run:
    return fit(Counted, plan, samples(count), STEP // replicas, **options)


ALONE: dict[str, Any] = {"devices": 1}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stages", "count", "options"),
    [
        # The last step of an epoch has one sample, so the second replica has none.
        (2, 25, {}),
        (2, 24, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        pytest.param(3, 37, {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
    ],
)
def test_replicas_equal_one_device(stages: int, count: int, options: dict[str, Any]) -> None:
    assert_same(fit_tokens(ALONE, count, 1, **options), fit_tokens(pipeline(2 * stages), count, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "replicas"),
    [
        (pipeline(schedule="gpipe"), 2),
        (pipeline(schedule="interleaved_zero_bubble"), 2),
        (pipeline(6, 3, shares=[3, 0, 1]), 3),
    ],
    ids=["gpipe", "zero bubble", "unequal shares"],
)
def test_replicas_with_other_schedules_and_unequal_shares(plan: dict[str, Any], replicas: int) -> None:
    assert_same(fit_tokens(ALONE, 25, 1), fit_tokens(plan, 25, replicas))


# Replicas that do not do the same


class Branches(nn.Module):
    """Uses one of two layers, by the number of samples, which differs between replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.many, self.few = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, value: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(value))
        middle = self.many if len(value) > 3 else self.few
        return self.last(torch.tanh(middle(hidden)))


class Branching(L.LightningModule):
    """Counts batches, also in a metric; leaves out those without a positive value."""

    def __init__(self, layers: Callable[[], nn.Module] = Branches) -> None:
        super().__init__()
        self.net = layers()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not (batch[0] > 0).any():
            return None
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(self.net(batch[0]).square().mean(), weight=len(batch[0]))
        self.log("val", self.mean)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)


def values(count: int) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    return torch.randn(count, 3, generator=draw, dtype=torch.float64)


def divided() -> Tensor:
    """Values of which the second replica has the positive ones: the samples of a step are dealt in turn."""
    data = values(16).abs()
    data[0::2] *= -1
    return data


CUT = {"cut_before": ["net.last"]}


@pytest.mark.slow
def test_replicas_that_use_other_layers() -> None:
    """All replicas hold each layer in the processes of the same stages, whichever has used it."""
    # Of 14 samples, a step of 8 gives each replica 4, and one of 6 gives each 3.
    data = TensorDataset(values(14))
    actual = fit(Branching, pipeline(micro_batches=1, **CUT), data, 4, max_epochs=3)
    torch.manual_seed(3)
    alone, batches = Branching(), [range(0, 8, 2), range(1, 8, 2), [8, 10, 12], [9, 11, 13]]
    quiet(devices=1, accumulate_grad_batches=2, max_epochs=3).fit(alone, DataLoader(data, batch_sampler=batches))
    assert actual.trainer.global_step == 6
    assert_equal(alone.net, actual.module.net, 1e-12)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*returned None for every batch")
def test_replicas_that_leave_out_their_batch() -> None:
    """The first replica skips all batches, so only the second cuts the network."""
    data = divided()
    options = {"num_sanity_val_steps": 0}
    actual = fit(Branching, pipeline(**CUT), TensorDataset(data), 2, **options)
    expected = fit(Branching, ALONE, TensorDataset(data[1::2]), 2, **options)
    assert_equal(expected.module.net, actual.module.net, 1e-12)


# State


class Normalised(Branching):
    """Has running statistics in both stages, and replaces a buffer in the step."""

    def __init__(self) -> None:
        parts = (nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        super().__init__(lambda: nn.Sequential(*parts))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.seen: list[list[dict[str, Tensor]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.total = self.total + batch[0].sum()
        return super().training_step(batch, batch_idx)

    def gather(self) -> None:
        buffers = {name: value.clone() for name, value in self.trainer.strategy.module_state(self).items()}
        self.seen.append(self.trainer.strategy.gather_objects(buffers))

    on_validation_epoch_start = on_train_end = gather


@pytest.mark.thorough
@pytest.mark.parametrize("evaluations", [1, 0])
def test_buffers_of_replicas_are_the_same_after_training_and_before_an_evaluation(evaluations: int) -> None:
    plan = pipeline(cut_before=["net.2"], micro_batches=2)
    options = {"num_sanity_val_steps": 0, "limit_val_batches": evaluations}
    module = fit(Normalised, plan, TensorDataset(values(16)), 4, **options).module
    assert len(module.seen) == 2 * evaluations + 1
    for first, second in module.seen:
        assert first["total"] != 0
        assert first["net.1.running_mean"].abs().sum() > 0
        assert_equal(first, second)


class Dropping(Branching):
    """Leaves out its first batch in the second replica alone, and drops values in the first stage."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.current_epoch == 0 and batch_idx == 0 and self.global_rank == 1:
            return None
        return self.net(batch[0]).square().mean()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*returned None for every batch")
def test_dropout_of_replicas_goes_on_in_a_resumed_run(tmp_path: Path) -> None:
    """In the middle of a window of two batches, to the bit."""
    plan, data = {**pipeline(cut_before=["net.2"]), "accumulate_grad_batches": 2}, TensorDataset(values(40))
    whole = fit(Dropping, plan, data, 4, callbacks=[EachStep(tmp_path)])
    assert_equal(whole.module, fit(Dropping, plan, data, 4, ckpt_path=tmp_path / "step=2.ckpt").module)


# Replicas that differ


class Scaled(nn.Module):
    """Counts positive samples in a buffer that should not change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, value: Tensor) -> Tensor:
        stay_whole(value)
        if (value > 0).all():
            self.scale += 1
        return self.linear(value)


class Differing(Branching):
    """Has the same cut in each test: the last layer alone is in the main process."""

    def __init__(self, change: Callable[["Differing"], None]) -> None:
        super().__init__(lambda: nn.Sequential(Scaled(), nn.Linear(3, 2), nn.Linear(2, 1)))
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.change(self)


def fit_differing(change: Callable[[Differing], None], data: Tensor, **options: Any) -> None:
    plan = pipeline(cut_before=["net.2"], micro_batches=2)
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0, **options}
    fit(lambda: Differing(change), plan, TensorDataset(data), 4, **options)


def in_the_second_replica(change: Callable[[Differing], None], step: int) -> Callable[[Differing], None]:
    @torch.no_grad()
    def change_there(module: Differing) -> None:
        if module.global_rank == 1 and module.global_step == step:
            change(module)

    return change_there


def set_rate(module: Differing) -> None:
    module.optimizers().param_groups[0]["lr"] = 0.1


def shift_bias(module: Differing) -> None:
    module.net[2].bias.add_(1e-9)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "step", "message"),
    [
        (shift_bias, 1, r"net\.2\.bias .* All agreed before the first optimiser step; this is step 1,"),
        (set_rate, 3, r"net\.0\.linear\.weight .* 5 other tensors .* after optimiser step 2; this is step 4,"),
    ],
    ids=["last stage", "all stages"],
)
def test_replicas_that_differ_end_the_run(change: Any, step: int, message: str) -> None:
    """The optimisers of workers receive the options of their replica's."""
    match = f"^Replicas differ between processes: {message}"
    with pytest.raises(StepError, match=match.replace(" .*", r" is not the same in rank 1 as in rank 0\..*", 1)):
        fit_differing(in_the_second_replica(change, step), -values(16).abs())
    nobody_is_left()


@pytest.mark.thorough
def test_a_buffer_of_a_worker_that_one_replica_has_changed() -> None:
    with pytest.raises(StepError, match=r"the buffer net\.0\.scale is not the same in rank 1 as in rank 0\."):
        fit_differing(lambda module: None, divided())


@pytest.mark.thorough
def test_a_checkpoint_is_not_written_of_replicas_that_differ(tmp_path: Path) -> None:
    options = {"callbacks": [EachStep(tmp_path)]}
    with pytest.raises(StepError, match=r"net\.2\.bias .*after optimiser step 2; this is step 3,"):
        fit_differing(in_the_second_replica(shift_bias, 2), -values(32).abs(), **options)
    assert {path.name for path in tmp_path.iterdir()} == {"step=1.ckpt", "step=2.ckpt"}


# Failures


def fit_faulty(place: str, how: Callable[[], None], stage: int) -> None:
    plan = pipeline(6, micro_batches=2, cut_before=["net.1", "net.2"])
    options = {"precision": "32-true", "max_epochs": 1, "num_sanity_val_steps": 0}
    fit(lambda: Faulty(place, how, stage), plan, TensorDataset(torch.randn(16, 3)), 2, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "stage"), [("forward", 0), ("validation", 2)])
def test_an_error_in_a_stage_ends_all_replicas(place: str, stage: int) -> None:
    with pytest.raises(Mistake, match="on purpose"):
        fit_faulty(place, raises, stage)
    nobody_is_left()


@pytest.mark.thorough
def test_a_process_that_is_killed_is_named() -> None:
    with pytest.raises(WorkerError, match=r"rank \d of 6 was killed by SIGKILL"):
        fit_faulty("backward", is_killed, 0)
    nobody_is_left()


class Heavy(nn.Module):
    """Runs out of memory with more than two samples, if it fails."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.norm, self.fails = nn.BatchNorm1d(5), fails

    def forward(self, value: Tensor) -> Tensor:
        if self.fails and self.training and len(value) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.norm(value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*memory")
def test_a_batch_that_does_not_fit_is_done_again() -> None:
    def run(micro_batches: int, *, fails: bool) -> nn.Module:
        plan = pipeline(micro_batches=micro_batches, cut_before=["net.2"])
        make = lambda: Branching(lambda: nn.Sequential(nn.Linear(3, 5), Heavy(fails), nn.Tanh(), nn.Linear(5, 1)))  # noqa: E731
        options = {"callbacks": [OOMRecovery()], "num_sanity_val_steps": 0}
        return fit(make, plan, TensorDataset(values(32)), 8, **options).module

    assert_equal(run(4, fails=False), run(1, fails=True), 1e-12)


@pytest.mark.slow
def test_replicas_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("PipelineStrategy(engine=engine)", "PipelineStrategy(engine=engine, replicas=2)"))
    options = ["--standalone", "--nproc-per-node", "4"]
    assert not torchrun(monkeypatch, script, [str(tmp_path), "4", "1", "processes"], options)
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [result["rank"] for result in found] == [0, 2, 1, 3]
    assert all(result["weights"] == found[0]["weights"] for result in found)


# Arguments


def test_statistics_over_replicas_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="sync_batchnorm=True does not go with replicas"):
        fit_tokens(pipeline(), 24, sync_batchnorm=True)


@pytest.mark.parametrize(
    ("options", "devices", "message"),
    [
        ({"replicas": 0}, 4, "replicas must be an integer of at least 1"),
        ({"replicas": 2, "engine": "threads"}, 4, "replicas are for engine='processes'"),
        ({"replicas": 3}, 4, "replicas=3 need as many devices each, at least 2, but there are 4 devices. Give 6"),
        ({"replicas": 4}, 4, "take 'ddp'"),
        ({"replicas": 2, "shares": [1.0]}, 4, "are 1 numbers, but there are 2 replicas"),
        ({"replicas": 2, "shares": [0, 0]}, 4, "not all of them 0"),
        ({"replicas": 1, "shares": [5]}, 4, "shares are for several replicas"),
        ({"replicas": 2, "cut_before": ["a", "b"]}, 4, "cut_before must have 1 entries for 2 devices of each replica"),
        ({"link_speeds": {1.0, 2.0}}, 2, "link_speeds are MiB per second"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], devices: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        quiet(**pipeline(devices, **options))
