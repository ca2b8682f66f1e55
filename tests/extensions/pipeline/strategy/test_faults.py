"""Errors in a pipeline end it cleanly, and steps that run out of memory are done again."""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from equipoise import OOMRecovery
from tests.support.batches import CLASSES, Batches
from tests.support.networks.layers import WIDTH, Task
from tests.support.networks.transparency import Mlp
from tests.support.pairs import pairwise
from tests.support.pipelines import assert_same, fit, pipelined, quiet, stay_whole

pytestmark = [
    pytest.mark.filterwarnings(
        r"ignore:Batch \d+ of \d+ samples?", r"ignore:cpu \(number \d\) ran out", "ignore:cpu ran out"
    ),
    pytest.mark.usefixtures("quick_collections", "no_thread_is_left"),
]

SIZES = [13, 13, 5]


# Errors


class Fault(nn.Module):
    """Raises in the forward or the backward at its n-th call.

    Args:
        at: The call, from 0; those of profiling do not count.
        phase: Where.
        error: What it raises.
        times: How many calls in a row.
    """

    def __init__(self, at: int = 2, phase: str = "forward", error: Any = ValueError, times: int = 1) -> None:
        super().__init__()
        self.at, self.phase, self.error, self.times, self.calls = at, phase, error, times, 0
        self.armed = False
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        stay_whole(x)
        out = torch.tanh(self.layer(x))
        if not self.armed or not self.training or not torch.is_grad_enabled():
            return out
        self.calls += 1
        if self.at < self.calls <= self.at + self.times:
            if self.phase == "forward":
                raise self.error("injected")
            out.register_hook(self.fail)
        return out

    def fail(self, gradient: Any) -> None:
        raise self.error("injected")


class Failing(Task):
    """One of three layers fails after the first step, or from the first window on."""

    def __init__(self, where: int, **options: Any) -> None:
        blocks: list[nn.Module] = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        blocks[where] = Fault(**options)
        super().__init__(nn.Sequential(nn.Flatten(), *blocks, nn.Linear(WIDTH, CLASSES)))
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.net[self.where + 1].armed = self.trainer.global_step > 0 or self.trainer.accumulate_grad_batches > 1
        return nn.functional.cross_entropy(self.net(batch["features"]), batch["label"])


CUT = {"cut_before": ["net.2", "net.3"], "micro_batches": 4}
ERRORS = [ValueError, KeyboardInterrupt, SystemExit]
LOOP = {"cut_before": ["net.2", "net.3", "net.4"], "schedule": "interleaved_1f1b"}
# On three devices, and four stages on two.
PLANS: list[tuple[int, dict[str, Any]]] = [(3, {}), (2, LOOP)]


@pytest.mark.quick_cases(5)
@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("stage", "phase", "error", "threads", "plan"),
    pairwise([0, 1, 2], ["forward", "backward"], ERRORS, [None, True], PLANS),
)
def test_errors_in_a_stage_end_the_run_cleanly(stage, phase, error, threads, plan):
    """They name the stage; no thread is left, no forward is caught any more, and the same trainer can continue."""
    module = Failing(stage, phase=phase, error=error).double()
    devices, schedule = plan
    options = pipelined(devices, threads=threads, **{**CUT, **schedule})
    trainer = quiet(**options)
    with pytest.raises(error, match="injected") as raised:
        trainer.fit(module, DataLoader(Batches(SIZES), batch_size=None))
    device = options["strategy"].devices[stage % devices]
    assert f"This was stage {stage} of the pipeline, on {device}." in raised.value.__notes__
    assert "forward" not in vars(module.net)
    assert "forward" not in vars(module)
    module.net[stage + 1].at = 10**6
    trainer.fit(module, DataLoader(Batches(SIZES), batch_size=None))


class FailingStep(Mlp):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.cleaned = place, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fails = len(batch["label"]) == 3
        try:
            if fails and self.place == "before":
                raise ValueError("injected")
            logits = self(batch["features"])
            if fails:
                raise ValueError("injected")
        except Exception:
            # Steps that are abandoned pass by this.
            assert fails
            raise
        finally:
            self.cleaned += 1
        return nn.functional.cross_entropy(logits, batch["label"])


@pytest.mark.parametrize("threads", [None, True])
@pytest.mark.parametrize("place", ["before", "after"])
def test_errors_in_a_step_end_it_and_all_others(place, threads):
    """Of five micro-batches the fourth fails; every step that has begun comes to its end."""
    module = FailingStep(place).double()
    trainer = quiet(**pipelined(2, micro_batches=4, threads=threads))
    with pytest.raises(ValueError, match="injected"):
        trainer.fit(module, DataLoader(Batches([13]), batch_size=None))
    assert module.cleaned == (2 if place == "before" else 4)
    assert "forward" not in vars(module)


def test_a_failed_attempt_keeps_no_tensor_alive():
    """Without the help of the garbage collector."""
    alive: list[Any] = []
    # Threads of autograd, one for each device, may release the last graph a moment after the error.
    ended = threading.Semaphore(0)

    class Kept(Failing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            tensor = batch["features"] * 1
            alive.append(weakref.ref(tensor, lambda _: ended.release()))
            return super().training_step({**batch, "features": tensor}, batch_idx)

    gc.collect()
    gc.disable()
    try:
        for threads in (None, True):
            module = Kept(1, phase="backward").double()
            trainer = quiet(**pipelined(3, threads=threads, **CUT))
            with pytest.raises(ValueError, match="injected"):
                trainer.fit(module, DataLoader(Batches(SIZES), batch_size=None))
            assert alive
            for _ in alive:
                assert ended.acquire(timeout=60)
            assert [one for one in alive if one() is not None] == []
            alive.clear()
    finally:
        gc.enable()


# Out of memory


@pytest.mark.quick_cases(4)
@pytest.mark.few_cases(1)
@pytest.mark.parametrize(
    ("stage", "phase", "threads", "plan"), pairwise([0, 1, 2], ["forward", "backward"], [None, True], PLANS)
)
def test_a_stage_that_runs_out_of_memory_takes_smaller_micro_batches(stage, phase, threads, plan):
    """The step is done again with more of them, exactly, in the midst of an accumulation window."""

    def make(**options: Any) -> Any:
        return Failing(stage, **options)

    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    expected = fit(lambda: make(at=10**6), SIZES, **options)
    recovery = OOMRecovery()

    def failing() -> Any:
        return make(phase=phase, error=torch.OutOfMemoryError, at=5, times=2)

    devices, schedule = plan
    options |= pipelined(devices, threads=threads, **{**CUT, **schedule})
    run = fit(failing, SIZES, **options, callbacks=[recovery])
    assert_same(expected, run)
    assert run.module.net[stage + 1].calls > 2 * (4 + 4 + 4)
    assert recovery.events[-1].device == str(options["strategy"].devices[stage % devices])
