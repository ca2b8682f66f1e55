"""The order of work on several streams of a simulated device is checked, as it would go wrong on a real one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.simulated.devices.installation import extension

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")

Wait = Callable[[torch.Stream, torch.Stream], None]


def by_stream(waiting: torch.Stream, other: torch.Stream) -> None:
    waiting.wait_stream(other)


def by_event(waiting: torch.Stream, other: torch.Stream) -> None:
    waiting.wait_event(other.record_event())


def by_host(waiting: torch.Stream, other: torch.Stream) -> None:
    other.synchronize()


def by_query(waiting: torch.Stream, other: torch.Stream) -> None:
    assert other.record_event().query()


def by_device(waiting: torch.Stream, other: torch.Stream) -> None:
    torch.cuda.synchronize(SECOND)


WAITS = [by_stream, by_event, by_host, by_query, by_device]


def streams() -> tuple[torch.Stream, torch.Stream]:
    return torch.cuda.current_stream(SECOND), torch.cuda.Stream(SECOND)


def made_on(stream: torch.Stream) -> Tensor:
    with torch.cuda.stream(stream):  # type: ignore[arg-type]
        return torch.ones(3, device=SECOND) * 2


# A wait between two streams


def test_a_read_without_a_wait_is_refused() -> None:
    current, side = streams()
    values = made_on(side)
    with pytest.raises(RuntimeError, match=f"stream {current.stream_id} of cuda:1 reads a tensor that stream"):
        values + 1
    values.record_stream(current)  # type: ignore[arg-type]  # it orders memory, not work
    with pytest.raises(RuntimeError, match=r"Streams in disorder.* has written, without a wait"):
        values.to(FIRST)
    with pytest.raises(RuntimeError, match=r"Streams in disorder.* has written, without a wait"):
        values.cpu()


@pytest.mark.parametrize("wait", WAITS)
def test_a_write_waits_for_reads(wait: Wait) -> None:
    current, side = streams()
    values = torch.ones(3, device=SECOND)
    side.wait_stream(current)
    with torch.cuda.stream(side):  # type: ignore[arg-type]
        copy = values * 2
    with pytest.raises(RuntimeError, match=r"writes a tensor that .* reads"):
        values.zero_()
    wait(current, side)
    values.zero_()
    copy.record_stream(current)  # type: ignore[arg-type]
    assert (copy + values).tolist() == [2, 2, 2]


def test_an_event_marks_what_was_done_before_it() -> None:
    current, side = streams()
    values = made_on(side)
    event = side.record_event()
    with torch.cuda.stream(side):  # type: ignore[arg-type]
        values.add_(1)
    current.wait_event(event)
    with pytest.raises(RuntimeError, match=r"Streams in disorder"):
        values.sum()
    current.wait_stream(side)
    values.record_stream(current)  # type: ignore[arg-type]
    assert values.sum() == 9


def test_views_share_the_order_of_their_memory() -> None:
    current, side = streams()
    view = made_on(side)[1:]
    with pytest.raises(RuntimeError, match=r"Streams in disorder"):
        view.sum()
    current.wait_stream(side)
    view.record_stream(current)  # type: ignore[arg-type]
    assert view.sum() == 4


# Memory


def test_memory_that_another_stream_uses_is_not_freed() -> None:
    current, side = streams()
    values = made_on(side)
    current.wait_stream(side)
    total = values.sum()
    del values
    with pytest.raises(RuntimeError, match=r"was freed while stream \d+ of cuda:1 still uses it.*`record_stream`"):
        total + 1
    assert total == 6  # it is reported once


def test_memory_may_be_freed_when_its_stream_has_waited() -> None:
    current, side = streams()
    values = made_on(side)
    current.wait_stream(side)
    total = values.sum()
    side.wait_stream(current)
    del values
    assert total == 6


# Copies


@pytest.mark.parametrize("pinned", [True, False])
def test_copies_of_a_side_stream(pinned: bool) -> None:
    """They wait for nothing but their own stream, and are ordered by an event."""
    current, side = streams()
    torch.ones(3, device=SECOND).sum()  # work that the copy does not wait for
    source = torch.arange(3.0).pin_memory() if pinned else torch.arange(3.0)
    before = extension().waits()
    with torch.cuda.stream(side):  # type: ignore[arg-type]
        copy = source.to(SECOND, non_blocking=True)
    assert extension().waits() - before == (0 if pinned else 1)
    assert extension().last_writer(copy) == side.stream_id
    assert not extension().is_behind(1, side.stream_id, current.stream_id)
    # The host has waited for the copy of memory that is not pinned.
    assert extension().is_behind(1, current.stream_id, side.stream_id) is not pinned
    current.wait_event(side.record_event())
    assert extension().is_behind(1, current.stream_id, side.stream_id)
    copy.record_stream(current)  # type: ignore[arg-type]
    assert copy.tolist() == [0, 1, 2]
