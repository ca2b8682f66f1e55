"""One pass over a loader: it knows its last batch, is read no further than asked for, and goes on where it was."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Sampler,
)

from equipoise.strategies.distributed.epoch_length import Extent, certainty_of, length_of
from equipoise.trainer.data.batch_stream import BatchStream
from tests.support.trainer_runs import Stream
from tests.trainer.data.few_batches import Counted, numbers


class Unsized:
    """Numbers, and nobody knows how many; it says when it was asked for one."""

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            self.asked = number + 1
            yield number


def stream_of(source: Any, limit: float = math.inf) -> BatchStream:
    length = length_of(source)
    promised = math.inf if length is None else min(length, limit)
    return BatchStream(source, Extent(promised, limit, certainty_of(source)))


@given(count=st.integers(1, 8), limit=st.one_of(st.integers(1, 10), st.just(math.inf)), sized=st.booleans())
def test_a_stream_knows_its_last_batch_when_it_hands_it_out(count: int, limit: float, sized: bool) -> None:
    source = Unsized(count)
    stream = stream_of(list(range(count)) if sized else source, limit)
    seen, last = [], []
    for index, batch in enumerate(stream):
        seen.append(batch)
        last.append(index + 1 == stream.length)
    total = int(min(count, limit))
    assert seen == list(range(total))
    assert last == [False] * (total - 1) + [True]
    assert sized or source.asked == total  # none beyond a limit


KINDS: dict[str, Callable[[int], Any]] = {
    "in order": lambda count: DataLoader(Counted(count), batch_size=2),
    "shuffled": lambda count: DataLoader(Counted(count), batch_size=2, shuffle=True),
    "with a generator": lambda count: DataLoader(
        Counted(count), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "samples": lambda count: DataLoader(Counted(count), batch_size=None, shuffle=True),
    "a stream": lambda count: DataLoader(Stream(count), batch_size=2),
    "a list": lambda count: list(range(count)),
    "unsized": lambda count: Unsized(count),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("kind", KINDS)
@given(count=st.integers(2, 9), seed=st.integers(0, 2**31), share=st.floats(0, 1))
def test_a_pass_over_a_loader_goes_on_exactly_where_it_was(kind: str, count: int, seed: int, share: float) -> None:
    """The rest of the batches, and all the random numbers that are drawn after them."""
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    whole = numbers(stream_of(KINDS[kind](count)))
    after = torch.get_rng_state()
    seen = int(share * len(whole))
    torch.set_rng_state(state)
    stream = stream_of(source := KINDS[kind](count))
    stream.resume(seen)
    assert numbers(stream) == whole[seen:]
    assert torch.equal(torch.get_rng_state(), after)
    if getattr(source, "batch_sampler", None) is not None and isinstance(source.dataset, Counted):
        assert len(source.dataset.read) == sum(
            len(np.atleast_1d(batch)) for batch in whole[seen:]
        )  # nothing for nothing


class Promising(Sampler[int]):
    """Draws six samples, and promises another number, or none."""

    def __init__(self, promised: int | None) -> None:
        self.promised = promised

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))

    def __len__(self) -> int:
        if self.promised is None:
            raise TypeError
        return self.promised


@pytest.mark.parametrize("promised", [None, 3, 6, 8])
def test_a_batch_that_was_read_ahead_is_read_once(promised: int | None) -> None:
    # Beyond its length a loader is not read.
    read = min(6, promised or 6)
    for seen in range(1, read):
        source = DataLoader(range(6), batch_size=1, sampler=Promising(promised))  # type: ignore[arg-type]
        stream = stream_of(source)
        begun = iter(stream)
        for _ in range(seen):
            next(begun)
        resumed = stream_of(source)
        resumed.resume(seen, ahead=stream.ahead)
        assert [int(batch) for batch in resumed] == list(range(seen, read)), seen
