"""Each process has a clock; the slowest one is named."""

import pytest
import torch

from equipoise import DDPStrategy
from equipoise.extensions.timing import clock as clock_module
from tests.extensions.timing.programs import Ticking, fit, loader
from tests.support.callback_runs import Clock


class OneIsSlow(Ticking):
    """In each process a clock of its own, which runs longer in the forward of the last one."""

    def setup(self, stage: str) -> None:
        # The processes of a test end after it, so nothing is to be undone.
        clock_module.perf_counter = self.clock  # type: ignore[assignment]
        self.seconds["forward"] += self.trainer.global_rank


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "native"])
def test_a_slow_process_is_named(engine: str) -> None:
    torch.manual_seed(0)
    clock = Clock()
    strategy = DDPStrategy(engine=engine)
    times, _ = fit(OneIsSlow(clock), loader(clock, samples=48), strategy=strategy, devices=2)
    # 21 steps, of which the backward, 2 s, is where processes wait for each other.
    assert times.times.ranks == [21 * 1.5, 21 * 2.5]
    assert times.limit.startswith("rank 1 is 67% slower than the others, which wait 29% of the time for it")
