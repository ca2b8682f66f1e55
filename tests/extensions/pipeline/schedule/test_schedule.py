"""Orders of forwards and backwards: complete, without a deadlock, as idle and as full as the theory says."""

import random
from itertools import accumulate, pairwise

import pytest

from equipoise import ConfigurationError
from equipoise.extensions.common.timeline import Action, Span, Timeline
from equipoise.extensions.pipeline.schedule.schedule import (
    SCHEDULES,
    Schedule,
    actions_of,
    check_schedule,
    check_stages,
    occupancy,
    splits,
)
from equipoise.extensions.pipeline.schedule.simulation import simulate

PLANS: list[tuple[Schedule, int]] = [
    ("gpipe", 1), ("1f1b", 1), *((name, count) for name in SCHEDULES[2:] for count in (2, 3, 5)),
    ("interleaved_zero_bubble", 1),
]  # fmt: skip


def most_held(schedule: Schedule, device: int, devices: int, micro_batches: int, each: int) -> int:
    """The most activations that a device may hold, of all of its stages, as papers have it."""
    every = each * micro_batches
    full = {"1f1b": devices - device, "interleaved_1f1b": 2 * (devices - device - 1) + (each - 1) * devices + 1}
    full["interleaved_zero_bubble"] = each * devices
    return min(every, full.get(schedule, every))


@pytest.mark.few_cases(53)
@pytest.mark.parametrize(("schedule", "each"), PLANS)
@pytest.mark.parametrize(
    ("devices", "micro_batches"),
    [(1, 1), (1, 6), (2, 5), (3, 2), (3, 13), (4, 1), (7, 13)],
)
def test_a_device_holds_as_much_as_is_told_and_no_more_than_papers_say(schedule, each, micro_batches, devices):
    for device in range(devices):
        actions = actions_of(schedule, device, devices, micro_batches, each)
        for stage in range(device, devices * each, devices):
            full = half = most = later = between = 0
            learns = False
            for action in (action for at, action in actions if at == stage):
                gone = action.weights if splits(schedule) else action.backward
                learns |= gone
                full += (not action.backward) - gone
                half += (action.backward and not gone) - action.weights
                most, later = max(most, full), max(later, full if learns else 0)
                between = max(between, half)
            assert occupancy(schedule, stage, devices, micro_batches, each) == (most, later, between)
        changes = (
            (not action.backward) - (action.weights or (not splits(schedule) and action.backward))
            for _, action in actions
        )
        whole = max(accumulate(changes))
        most_of_paper = most_held(schedule, device, devices, micro_batches, each)
        assert whole == most_of_paper if each == 1 and not splits(schedule) else whole <= most_of_paper


@pytest.mark.parametrize(("schedule", "each"), PLANS)
@pytest.mark.parametrize(
    ("devices", "micro_batches"), [(1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (2, 8), (4, 2), (4, 4), (4, 8)]
)
def test_equal_stages_idle_as_the_theory_says(devices, micro_batches, schedule, each):
    """Interleaved ones with a multiple of as many micro-batches as there are devices."""
    if schedule not in ("gpipe", "1f1b"):
        micro_batches *= devices
    for backward in (2.0,) if splits(schedule) else (1.0, 2.0):
        stages = devices * each
        timeline = simulate(schedule, [1.0] * stages, [backward] * stages, micro_batches, each)
        lost = (devices - 1) * (1 if splits(schedule) else 1 + backward)
        whole = each * micro_batches * (1 + backward) + lost
        assert timeline.seconds == pytest.approx(whole)
        assert timeline.idle == pytest.approx(lost / whole, abs=1e-12)
        assert len(timeline.spans) == (2 + splits(schedule)) * stages * micro_batches
        assert timeline.devices == devices


def test_interleaved_forwards_are_there_while_values_are_on_their_way():
    """As many before a device's first backward as the paper says, though fewer would fill the pipeline."""
    first = [action.backward for _, action in actions_of("interleaved_1f1b", 1, 4, 12, 3)].index(True)
    assert first == 2 * (4 - 1 - 1) + (3 - 1) * 4 + 1
    assert simulate("interleaved_1f1b", [1.0] * 4, [1.0] * 4, 3, 2).idle == pytest.approx(0.2)


def test_nothing_begins_before_what_it_needs_and_nothing_waits_for_ever():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(200):
        (schedule, each), devices, micro_batches = draw.choice(PLANS), draw.randint(1, 6), draw.randint(1, 14)
        stages = devices * each
        times = [[draw.uniform(0.1, 3) for _ in range(stages)] for _ in range(2)]
        timeline = simulate(schedule, *times, micro_batches, each)
        at = {(span.stage, span.action): span for span in timeline.spans}
        assert len(at) == len(timeline.spans) == (2 + splits(schedule)) * stages * micro_batches
        for (stage, action), span in at.items():
            before = stage + 1 if action.backward else stage - 1
            if action.weights:
                needed: Span | None = at[stage, action._replace(weights=False)]
            elif action.backward and before == stages:
                needed = at[stage, Action(False, action.micro_batch)]
            else:
                needed = at.get((before, action))
            assert needed is None or needed.end <= span.begin + 1e-12
        work = [sum(sum(each[device::devices]) for each in times) for device in range(devices)]
        assert timeline.seconds >= micro_batches * max(work) - 1e-9
        for device in range(devices):
            own = sorted(
                (span for span in timeline.spans if span.stage % devices == device), key=lambda span: span.begin
            )
            assert all(one.end <= other.begin + 1e-12 for one, other in pairwise(own))
            done = [(span.stage, span.action) for span in own]
            assert done == actions_of(schedule, device, devices, micro_batches, each)
            # In order, since what passes between two stages has no number.
            for kind in {(stage, action.backward, action.weights) for stage, action in done}:
                same = [action.micro_batch for at, action in done if (at, action.backward, action.weights) == kind]
                assert same == list(range(micro_batches))


def test_a_timeline_of_nothing():
    assert (Timeline((), 2).seconds, Timeline((), 2).idle) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("zero", "one of 'gpipe', '1f1b', 'looped_bfs', 'interleaved_1f1b', 'interleaved_zero_bubble', not 'zero'"),
        # Names of torch's.
        ("Interleaved1F1B", "not 'Interleaved1F1B'. Did you mean 'interleaved_1f1b'?"),
        ("LoopedBFS", "not 'LoopedBFS'. Did you mean 'looped_bfs'?"),
    ],
)
def test_unknown_schedules_are_refused(given, told):
    with pytest.raises(ConfigurationError, match=told):
        check_schedule(given)


def test_stages_per_device_fit_the_schedule():
    assert [check_stages(schedule, None) for schedule in SCHEDULES] == [1, 1, 2, 2, 2]
    assert check_stages("looped_bfs", 4) == 4
    assert check_stages("interleaved_zero_bubble", 1) == 1
    for schedule, instead in (("gpipe", "looped_bfs"), ("1f1b", "interleaved_1f1b")):
        assert check_stages(schedule, 1) == 1
        with pytest.raises(ConfigurationError, match=f"one stage on each device, .*=3. Take schedule='{instead}'"):
            check_stages(schedule, 3)
    with pytest.raises(ConfigurationError, match="'looped_bfs' needs at least 2 stages on each device"):
        check_stages("looped_bfs", 1)
    for wrong in (0, -1, 2.0, True, "2"):
        with pytest.raises(ConfigurationError, match="stages_per_device must be an integer of at least 1, not "):
            check_stages("looped_bfs", wrong)
