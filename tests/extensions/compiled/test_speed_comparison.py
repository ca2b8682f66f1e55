"""Which of two ways is faster, by a clock that the test moves."""

import pytest
import torch

from equipoise.extensions.compiled import speed_comparison
from equipoise.extensions.compiled.speed_comparison import SpeedComparison


class Clock:
    """Time that passes only in steps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speed_comparison, "time", clock)
    return clock


@pytest.mark.parametrize(("of_program", "is_faster"), [(0.9, True), (0.96, True), (0.98, False), (1.5, False)])
def test_the_fastest_steps_are_compared(clock: Clock, of_program: float, is_faster: bool) -> None:
    comparison = SpeedComparison(torch.device("cpu"))
    seconds = {True: [9.0, 9.0, of_program, 9.0, 9.0], False: [5.0, 5.0, 5.0, 5.0, 1.0]}
    turns = []
    while not comparison.is_complete():
        by_program = comparison.is_turn_of_program()
        turns.append(by_program)
        step = comparison.start()
        clock.now += seconds[by_program].pop(0)
        comparison.add(step, by_program=by_program)
    assert turns == [True, False] * 5
    assert comparison.seconds() == pytest.approx((of_program, 1.0))
    assert comparison.is_program_faster() == is_faster
