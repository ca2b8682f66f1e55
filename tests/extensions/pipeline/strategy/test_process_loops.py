"""Several stages in each process: exact, repeatable, and what fails in any of them is told."""

import re
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import PipelineStrategy
from equipoise.extensions.pipeline.schedule.schedule import actions_of
from tests.conftest import ignoring
from tests.extensions.pipeline.strategy.test_processes import (
    Model,
    Normalised,
    checkpoints,
    data,
    fit,
    make_trainer,
    on_one_device,
    processes,
    same,
)
from tests.support.pipelines import stay_whole

pytestmark = [*ignoring("Checkpoint directory"), pytest.mark.usefixtures("quick_collections")]

SCHEDULES = ["interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble"]


def looped(each: int = 2, **options: Any) -> PipelineStrategy:
    return processes(**{"schedule": "interleaved_1f1b", "stages_per_device": each, **options})


class Looks(L.Callback):
    """Compares the last step as it ran, in the process that leads, with what was to be done."""

    def __init__(self, plan: tuple[Any, int, int, int]) -> None:
        self.plan = plan

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        timeline, (schedule, devices, micro_batches, each) = trainer.strategy.timeline, self.plan
        assert (timeline.devices, timeline.stages) == (devices, devices * each)
        for device in range(devices):
            own = [(span.stage, span.action) for span in timeline.spans if span.stage % devices == device]
            assert own == actions_of(schedule, device, devices, micro_batches, each)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("devices", "each", "micro_batches"), [(2, 2, 1), (2, 2, 5), (2, 3, 13), (3, 2, 4), (3, 2, 2), (3, 3, 5)]
)
def test_weights_are_those_of_one_device(devices: int, each: int, micro_batches: int, schedule: str) -> None:
    strategy = looped(each, micro_batches=micro_batches, schedule=schedule)
    looks = Looks((schedule, devices, min(micro_batches, 5), each))
    same(on_one_device(), fit(Model, strategy, devices, callbacks=[looks], enable_checkpointing=False))


def test_both_engines_are_one() -> None:
    """To the bit, though norms and shared gradients are put together from several processes."""
    cut = ["net.blocks.0", "net.blocks.1", "net.blocks.3"]
    options = {"micro_batches": 4, "cut_before": cut, "schedule": "interleaved_1f1b"}
    runs = [
        fit(Model, PipelineStrategy(engine=engine, **options), 2, gradient_clip_val=0.05)
        for engine in ("threads", "processes")
    ]
    same(*runs, tolerance=1e-15)


def test_evaluations() -> None:
    module, one, other = Model(), make_trainer("single_device"), make_trainer(looped(3), 2)
    assert other.validate(module, data(), verbose=False)[0] == pytest.approx(
        one.validate(module, data(), verbose=False)[0], rel=1e-12
    )
    for actual, expected in zip(other.predict(module, data()) or [], one.predict(module, data()) or [], strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_other_stages(tmp_path: Any) -> None:
    whole = fit(Model, "single_device", accumulate_grad_batches=2)
    fit(Model, looped(), 2, accumulate_grad_batches=2, callbacks=[checkpoints(tmp_path)], max_steps=3)
    again = {"callbacks": [checkpoints(tmp_path)], "ckpt_path": tmp_path / "step=3.ckpt"}
    for strategy, devices in ((looped(schedule="looped_bfs"), 2), (processes(), 2), (looped(3), 2)):
        same(whole, fit(Model, strategy, devices, accumulate_grad_batches=2, **again))


class Fails(nn.Module):
    """Raises forward or backward, in training or in evaluation."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase, self.linear = phase, nn.Linear(5, 5)

    def forward(self, value: Tensor) -> Tensor:
        stay_whole(value)
        made: Tensor = self.linear(value)
        if len(value) == 4 and self.phase == ("forward" if self.training else "evaluation"):
            raise ValueError("injected")
        if len(value) == 4 and self.phase == "backward" and self.training and made.requires_grad:
            made.register_hook(self.fail)
        return made

    def fail(self, gradient: Tensor) -> None:
        raise ValueError("injected")


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("phase", ["forward", "backward", "evaluation"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_errors_come_home(stage: int, phase: str) -> None:
    """Stages 1 and 3 are this process's, 0 and 2 the other's."""

    class Failing(Normalised):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(Fails(phase) if index == stage else nn.Linear(5, 5) for index in range(4)))

    options = {"num_sanity_val_steps": 0, "max_epochs": 1}
    cut = ["net.1", "net.2", "net.3"]
    with pytest.raises(ValueError, match="injected") as raised:
        fit_sizes(Failing, looped(cut_before=cut, micro_batches=2), **options)
    if stage in (0, 2):
        notes = "".join(raised.value.__notes__)
        assert re.search(rf"This was stage {stage}, on (cpu|cuda:0), in a process of its own", notes)


def fit_sizes(make: Any, strategy: Any, **options: Any) -> None:
    """Batches of five samples are recorded; the fourth one, of eight, fails in micro-batches of four, or in whole."""
    trainer = make_trainer(strategy, 2, **options)
    train, val = ([[torch.randn(size, 5).double()] for size in sizes] for sizes in ((5, 5, 5, 8), (5, 4)))
    trainer.fit(make(), DataLoader(train, batch_size=None), DataLoader(val, batch_size=None))  # type: ignore[arg-type]
