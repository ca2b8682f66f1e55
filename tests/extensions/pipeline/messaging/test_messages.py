"""Values between real processes: what arrives is what was sent, in order, whatever it is."""

from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from equipoise import StepError, WorkerError
from equipoise.extensions.pipeline.messaging.messages import Messenger, StageError
from equipoise.parallel.communication.process_group import joined
from equipoise.parallel.communication.rank import Rank
from tests.support.nested import Checked
from tests.support.process_groups import in_group, started


class Pair(NamedTuple):
    left: Any
    right: Any


def sparse(draw: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor as gradients of embeddings are, with entries that are to be added."""
    return torch.sparse_coo_tensor(torch.tensor([[3, 1, 3]]), torch.randn(3, 5, dtype=dtype, generator=draw), (6, 5))


def values() -> list[Any]:
    draw = torch.Generator().manual_seed(4)
    kinds = [torch.bfloat16, torch.int64, torch.bool, torch.complex64]
    return [
        ("text", 3, {"a": [1.5, None]}),
        *(torch.randn(3, 4, generator=draw).mul(5).to(kind) for kind in kinds),
        [torch.empty(0, 3), torch.tensor(2.5), torch.ones(2, requires_grad=True)],
        Pair(torch.ones(2, 3).t(), {"b": (torch.arange(4)[::2],)}),
        [Checked(torch.ones(2)), pack_sequence([torch.ones(3), torch.ones(1)])],
        torch.randn(1100, 1000, generator=draw),  # more than goes in one message
        torch.randn(2, 3, 4, 5, generator=draw).to(memory_format=torch.channels_last),
        # Of one sample, whose strides torch takes for contiguous, as others do not.
        torch.empty_strided((1, 4, 4, 16), (16, 4, 1, 16)).copy_(torch.randn(1, 4, 4, 16, generator=draw)),
        torch.randn(3, 2, dtype=torch.complex64, generator=draw).t().conj(),
        # Memory with gaps, and memory of several values at once.
        (torch.randn(4, 6, generator=draw)[::2, ::3], torch.randn(3, 1, generator=draw).expand(3, 4)),
        {"text": "x" * 100_000},
        [sparse(draw), sparse(draw, torch.complex128), torch.zeros(3, 2).to_sparse()],
    ]


def exchange(rank: int, *, ahead: bool) -> tuple[list[Any], list[Any], bool]:
    """The first sends all twice on two ways, the second sends back what it got."""
    messenger = Messenger(60.0)
    if rank:
        for _ in range(2 * len(values())):
            if ahead:
                messenger.expect(0, 5)
            messenger.send(0, 7, (messenger.receive(0, 3), messenger.receive(0, 5)))
        messenger.flush()
        return [], [], False
    found: list[Any] = []
    for _ in range(2):
        for value in values():
            messenger.send(1, 3, value)
            messenger.send(1, 5, [value])
        found += [messenger.receive(1, 7) for _ in values()]
    messenger.flush()
    return found[: len(values())], found[len(values()) :], messenger.broken


@pytest.mark.thorough
@pytest.mark.parametrize("ahead", [False, True])
def test_messages_arrive_as_they_were_sent(ahead: bool) -> None:
    """Memory for messages is allocated on request or before, and nothing more is waited for."""
    first, second, broken = in_group(partial(exchange, ahead=ahead))[0]
    assert not broken
    for found in (first, second):
        for (one, other), value in zip(found, values(), strict=True):
            same(one, value)
            same(other, [value])


def is_dense(tensor: Tensor) -> bool:
    """Return whether each place of the tensor's memory has one value of it. A conjugated one is copied anyway."""
    step_and_size = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    filled = 1
    for step, size in step_and_size:
        if step != filled:
            return False
        filled *= size
    return tensor.numel() > 0


def same(found: Any, value: Any) -> None:
    assert type(found) is type(value)
    if isinstance(value, Tensor):
        assert (found.dtype, found.shape, found.requires_grad) == (value.dtype, value.shape, value.requires_grad)
        if value.is_sparse:
            assert found.is_coalesced()
            assert torch.equal(found.to_dense(), value.to_dense())
            return
        assert torch.equal(found, value.resolve_conj())
        assert found.is_leaf
        if is_dense(value):
            assert found.stride() == value.stride()
    elif isinstance(value, dict):
        assert found.keys() == value.keys()
        same(list(found.values()), list(value.values()))
    elif isinstance(value, tuple | list):
        for one, other in zip(found, value, strict=True):
            same(one, other)
    else:
        assert found == value


class Told(Exception):
    pass


def waits_in_vain(place: Rank, port: int) -> None:
    with joined(place, torch.device("cpu"), timeout=timedelta(seconds=300), port=port):
        messenger = Messenger(0.2)
        if place.global_rank:
            return
        with pytest.raises(RuntimeError, match=r"(?i)timed out"):
            messenger.receive(1, 3)
        assert messenger.broken
        with pytest.raises(WorkerError) as caught:
            messenger.send(1, 3, "what nobody would understand")
        raise Told(str(caught.value))


def test_a_message_that_does_not_come_times_out() -> None:
    with pytest.raises(Told, match="broken"):
        started(waits_in_vain)


class Unsendable(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"cannot be made again of its message: {one + other}")


@pytest.mark.parametrize("kind", [StepError, Unsendable])
def test_errors_of_a_stage_are_raised_in_the_main_process(kind: Any) -> None:
    error: BaseException
    try:
        raise kind(1, 2) if kind is Unsendable else kind("on purpose")
    except Exception as caught:
        failure = StageError.of(caught, 3, torch.device("cpu"))
    error = failure.as_error()
    assert isinstance(error, WorkerError if kind is Unsendable else kind)
    told = str(error) + "".join(getattr(error, "__notes__", []))
    assert "stage 3, on cpu" in told
    assert "test_messages.py" in told
