"""Replicas of a pipeline train as one device does on all samples of a step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from equipoise import ConfigurationError, OOMRecovery, PipelineStrategy, StepError, Trainer, WorkerError
from tests.extensions.pipeline.strategy.test_process_faults import SCRIPT, Faulty, nobody_is_left
from tests.extensions.pipeline.strategy.test_processes import (
    WORDS,
    Heavy,
    Model,
    Partly,
    Unfreezes,
    checkpoints,
    make_trainer,
    same,
)
from tests.strategies.ddp.test_faults import Mistake, is_killed, raises
from tests.strategies.programs import torchrun
from tests.support.pipelines import stay_whole

pytestmark = pytest.mark.usefixtures("quick_collections")

# Samples of a step on all replicas together.
STEP = 12
LENGTH = 6


class Counted(Model):
    """Logs means over tokens, which do not depend on the division into batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, weight = self.loss(batch)
        self.log("loss", loss, on_epoch=True, on_step=False, batch_size=int(weight))
        return {"loss": loss, "loss_weight": weight}


def samples(count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(5)
    words, labels = (torch.randint(WORDS, (count, LENGTH), generator=draw) for _ in range(2))
    mask = (torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (count, 1), generator=draw)).double()
    return TensorDataset(words, labels, mask)


def fit(
    strategy: Any,
    devices: int,
    replicas: int,
    count: int,
    *,
    make: Callable[[], L.LightningModule] = Counted,
    ckpt_path: Path | None = None,
    **options: Any,
) -> tuple[Any, Trainer]:
    trainer = make_trainer(strategy, devices, **options)
    module = make()
    trainer.fit(module, DataLoader(samples(count), STEP // replicas), DataLoader(samples(10), 5), ckpt_path=ckpt_path)
    return module, trainer


def pipeline(replicas: int = 2, **options: Any) -> PipelineStrategy:
    return PipelineStrategy(**{"engine": "processes", "timeout": 60.0, "replicas": replicas, **options})


@pytest.mark.parametrize(
    ("stages", "count", "options"),
    [
        # The last step of an epoch has one sample, so the second replica has none.
        (2, 25, {}),
        (2, 24, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        pytest.param(3, 29, {"gradient_clip_val": 0.1}, marks=pytest.mark.slow),
        pytest.param(3, 37, {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
    ],
)
def test_replicas_equal_one_device(stages: int, count: int, options: dict[str, Any]) -> None:
    expected = fit("single_device", 1, 1, count, **options)
    actual = fit(pipeline(), 2 * stages, 2, count, **options)
    same(expected, actual)


@pytest.mark.slow
def test_three_replicas_with_unequal_shares() -> None:
    expected = fit("single_device", 1, 1, 29)
    actual = fit(pipeline(3, shares=[3, 0, 1]), 6, 3, 29)
    same(expected, actual)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_zero_bubble"])
def test_schedules(schedule: str) -> None:
    expected = fit("single_device", 1, 1, 25)
    actual = fit(pipeline(schedule=schedule), 4, 2, 25)
    same(expected, actual)


@pytest.mark.slow
def test_parameters_that_are_trained_later() -> None:
    expected = fit("single_device", 1, 1, 25, make=Partly, callbacks=[Unfreezes()], max_epochs=3)
    actual = fit(pipeline(), 4, 2, 25, make=Partly, callbacks=[Unfreezes()], max_epochs=3)
    same_weights(actual[0], expected[0])


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
        torch.manual_seed(3)
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


def fit_values(
    strategy: Any,
    devices: int,
    values: Tensor,
    batch_size: int,
    make: Any,
    *,
    ckpt_path: Path | None = None,
    **options: Any,
) -> Any:
    module = make()
    data = TensorDataset(values)
    trainer = make_trainer(strategy, devices, **options)
    trainer.fit(module, DataLoader(data, batch_size), DataLoader(data, batch_size), ckpt_path=ckpt_path)
    return module, trainer


def same_weights(actual: nn.Module, expected: nn.Module) -> None:
    weights = actual.state_dict()
    for name, weight in expected.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-12, atol=1e-12, msg=name)


def values(count: int) -> Tensor:
    draw = torch.Generator().manual_seed(7)
    return torch.randn(count, 3, generator=draw, dtype=torch.float64)


class SmallLosses(Branching):
    """Has gradients that float16 can hold with the first scale."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss is None:
            return None
        return 0.01 * loss.float()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=10.0)


def test_a_replica_without_a_loss_in_its_first_window() -> None:
    """In float16, where the first loss of a process would prepare the scaler of its losses."""
    data = values(16).float()
    # The second replica has every second sample.
    data[1:8:2] = -1.0
    pairs = DataLoader(TensorDataset(data), batch_sampler=[range(0, 8, 2), range(1, 8, 2), range(8, 16)])
    expected = SmallLosses()
    expected_trainer = make_trainer("single_device", 1, precision="16-mixed", accumulate_grad_batches=2)
    expected_trainer.fit(expected, pairs)
    strategy = pipeline(cut_before=["net.last"], micro_batches=1)
    actual, trainer = fit_values(strategy, 4, data, 4, SmallLosses, precision="16-mixed")
    assert trainer.global_step == expected_trainer.global_step == 4
    for mine, theirs in zip(actual.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_replicas_that_use_other_layers() -> None:
    """All replicas hold each layer in the processes of the same stages, whichever has used it."""
    # Of 14 samples, a step of 8 gives each replica 4, and one of 6 gives each 3.
    cut = ["net.last"]
    every = fit_values(pipeline(cut_before=cut, micro_batches=1), 4, values(14), 4, Branching, max_epochs=3)
    uneven = pipeline(cut_before=cut, micro_batches=1, shares=[3, 5])
    shared = fit_values(uneven, 4, values(14), 4, Branching, max_epochs=3)
    for module, trainer in (every, shared):
        assert trainer.global_step == 6
        assert all(parameter.isfinite().all() for parameter in module.parameters())
    # The same batches on one device, whose window has a part for each replica.
    parts = DataLoader(
        TensorDataset(values(14)), batch_sampler=[range(0, 8, 2), range(1, 8, 2), [8, 10, 12], [9, 11, 13]]
    )
    alone = Branching()
    trainer = make_trainer("single_device", 1, max_epochs=3, accumulate_grad_batches=2)
    trainer.fit(alone, parts)
    for (name, expected), actual in zip(
        alone.net.state_dict().items(), every[0].net.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.filterwarnings("ignore:.*returned None for every batch")
def test_replicas_that_leave_out_their_batch() -> None:
    """The first replica skips all batches, so only the second cuts the network."""
    data = values(16)
    data[0::2] = -data[0::2].abs()
    data[1::2] = data[1::2].abs()
    # The samples of a step are dealt in turn: the first replica has the even ones.
    actual = fit_values(pipeline(cut_before=["net.last"]), 4, data, 2, Branching, num_sanity_val_steps=0)
    expected = fit_values("single_device", 1, data[1::2], 2, Branching, num_sanity_val_steps=0)
    same_weights(actual[0].net, expected[0].net)


# State


class Normalised(Branching):
    """Has running statistics in both stages, and replaces a buffer in the step."""

    def __init__(self) -> None:
        super().__init__(
            lambda: nn.Sequential(
                nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
            )
        )
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.seen: list[list[dict[str, Tensor]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.total = self.total + batch[0].sum()
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.gather()

    def on_train_end(self) -> None:
        self.gather()

    def gather(self) -> None:
        buffers = {name: value.clone() for name, value in self.trainer.strategy.module_state(self).items()}
        self.seen.append(self.trainer.strategy.gather_objects(buffers))


@pytest.mark.parametrize("evaluations", [1, 0])
def test_buffers_of_replicas_are_the_same_after_training_and_before_an_evaluation(evaluations: int) -> None:
    strategy = pipeline(cut_before=["net.2"], micro_batches=2)
    options = {"num_sanity_val_steps": 0, "limit_val_batches": evaluations}
    module, _ = fit_values(strategy, 4, values(16), 4, Normalised, **options)
    assert len(module.seen) == 2 * evaluations + 1
    for first, second in module.seen:
        assert first["total"] != 0
        assert first["net.1.running_mean"].abs().sum() > 0
        for name, value in first.items():
            assert torch.equal(value, second[name]), name


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
def test_random_numbers_of_a_resumed_run(tmp_path: Path) -> None:
    def run(**options: Any) -> Any:
        strategy = pipeline(cut_before=["net.2"])
        callbacks = [checkpoints(tmp_path)]
        return fit_values(strategy, 4, values(24), 4, Dropping, ckpt_path=ckpt_path, callbacks=callbacks, **options)[0]

    ckpt_path: Path | None = None
    expected = run()
    run(max_steps=2)
    ckpt_path = tmp_path / "step=2.ckpt"
    actual = run()
    for name, weight in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], weight), name


# Checkpoints


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "devices", "replicas"), [("replicas", 4, 2), ("single", 1, 1)])
def test_a_checkpoint_is_resumed(strategy: str, devices: int, replicas: int, tmp_path: Path) -> None:
    """Written in the middle of a window of two batches, by four processes."""
    options = {"accumulate_grad_batches": 2}
    whole = fit(pipeline(), 4, 2, 49, **options)
    fit(pipeline(), 4, 2, 49, callbacks=[checkpoints(tmp_path)], max_steps=3, **options)
    written = torch.load(tmp_path / "step=3.ckpt", weights_only=True)
    assert written["state_dict"].keys() == Model().state_dict().keys()
    if strategy == "single":
        module = Counted()
        module.load_state_dict(written["state_dict"])
        return
    again = {"callbacks": [checkpoints(tmp_path)], "ckpt_path": tmp_path / "step=3.ckpt"}
    same(whole, fit(pipeline(), devices, replicas, 49, **options, **again), tolerance=0)


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
    strategy = pipeline(cut_before=["net.2"], micro_batches=2)
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0, **options}
    fit_values(strategy, 4, data, 4, lambda: Differing(change), **options)


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


def test_a_buffer_of_a_worker_that_one_replica_has_changed() -> None:
    data = values(16)
    # The samples of a step are dealt in turn: the second replica has the odd ones.
    data[0::2] = -data[0::2].abs()
    data[1::2] = data[1::2].abs()
    with pytest.raises(StepError, match=r"the buffer net\.0\.scale is not the same in rank 1 as in rank 0\."):
        fit_differing(lambda module: None, data)


def test_a_checkpoint_is_not_written_of_replicas_that_differ(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"net\.2\.bias .*after optimiser step 2; this is step 3,"):
        fit_differing(in_the_second_replica(shift_bias, 2), -values(32).abs(), callbacks=[checkpoints(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {"step=1.ckpt", "step=2.ckpt"}


# Failures


def fit_faulty(place: str, how: Callable[[], None], stage: int) -> None:
    strategy = pipeline(micro_batches=2, cut_before=["net.1", "net.2"])
    loader = DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=2)
    make_trainer(strategy, 6, max_epochs=1, num_sanity_val_steps=0).fit(Faulty(place, how, stage), loader, loader)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("place", ["forward", "backward", "validation"])
@pytest.mark.parametrize("stage", [0, 2])
def test_an_error(place: str, stage: int) -> None:
    with pytest.raises(Mistake, match="on purpose"):
        fit_faulty(place, raises, stage)
    nobody_is_left()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_process_that_is_killed(stage: int) -> None:
    with pytest.raises(WorkerError, match=r"rank \d of 6 was killed by SIGKILL"):
        fit_faulty("backward", is_killed, stage)
    nobody_is_left()


class Hungry(Branching):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(3, 5), Heavy(), nn.Tanh(), nn.Linear(5, 1)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*memory")
def test_a_batch_that_does_not_fit() -> None:
    cut = ["net.2"]
    options = {"num_sanity_val_steps": 0}
    direct = fit_values(pipeline(micro_batches=4, cut_before=cut), 4, values(32), 8, Hungry, **options)
    recovery = {"callbacks": [OOMRecovery()], **options}
    split = fit_values(pipeline(micro_batches=1, cut_before=cut), 4, values(32), 8, Hungry, **recovery)
    same_weights(split[0], direct[0])


@pytest.mark.slow
def test_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        fit(pipeline(), 4, 2, 24, sync_batchnorm=True)


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
        make_trainer(pipeline(**options), devices)
