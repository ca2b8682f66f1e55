"""Orders of forwards and backwards: complete, without a deadlock, as idle and as full as the theory says."""

import random
from itertools import pairwise

import pytest

from equipoise import ConfigurationError
from equipoise.parallel.schedule import (
    SCHEDULES,
    Action,
    Span,
    Timeline,
    actions_of,
    check_schedule,
    in_flight,
    simulate,
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [1, 2, 4, 5, 13])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_every_micro_batch_goes_forward_and_then_backward_once(schedule, micro_batches, stages):
    for stage in range(stages):
        actions = actions_of(schedule, stage, stages, micro_batches)
        for backward in (False, True):
            assert [one.micro_batch for one in actions if one.backward is backward] == list(range(micro_batches))
        held = most = 0
        for action in actions:
            held += -1 if action.backward else 1
            most = max(most, held)
        assert held == 0
        assert most == in_flight(schedule, stage, stages, micro_batches)


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_equal_stages_idle_as_the_theory_says(stages, micro_batches):
    for schedule in SCHEDULES:
        timeline = simulate(schedule, [1.0] * stages, [2.0] * stages, micro_batches)
        assert timeline.idle == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-12)
        assert timeline.seconds == pytest.approx(3 * (micro_batches + stages - 1))
        assert len(timeline.spans) == 2 * stages * micro_batches


def test_nothing_begins_before_what_it_needs():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(50):
        stages, micro_batches = draw.randint(1, 5), draw.randint(1, 7)
        times = [[draw.uniform(0.1, 3) for _ in range(stages)] for _ in range(2)]
        timeline = simulate(draw.choice(SCHEDULES), *times, micro_batches)
        at = {(span.stage, span.action): span for span in timeline.spans}
        for (stage, action), span in at.items():
            before = stage + 1 if action.backward else stage - 1
            if action.backward and before == stages:
                needed: Span | None = at[stage, Action(False, action.micro_batch)]
            else:
                needed = at.get((before, action))
            assert needed is None or needed.end <= span.begin + 1e-12
        slowest = max(sum(pair) for pair in zip(*times, strict=True))
        assert timeline.seconds >= micro_batches * slowest - 1e-9
        for stage in range(stages):
            own = sorted((span for span in timeline.spans if span.stage == stage), key=lambda span: span.begin)
            assert all(one.end <= other.begin + 1e-12 for one, other in pairwise(own))


def test_a_timeline_of_nothing():
    assert (Timeline((), 2).seconds, Timeline((), 2).idle) == (0.0, 0.0)


def test_schedules_by_name():
    assert check_schedule("1f1b") == "1f1b"
    with pytest.raises(ConfigurationError, match="schedule must be one of 'gpipe', '1f1b', not 'zero'"):
        check_schedule("zero")
