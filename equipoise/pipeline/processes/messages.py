"""Messages between the processes of a pipeline: nested tensors of any sizes, and errors.

    a length      0 where the header is the same as last time on this way, and then small tensors along with it
    a header      the value without its tensors, and their dtypes and shapes
    the tensors   as bytes: small ones in one message, otherwise each in its own

In a pipeline's steady state headers repeat, so a small value is one message. Gloo sends nothing before the other side
has a place for it; so that a message need not wait until it is wanted, its place is made before (`expect`). Sending
never waits: what is sent must stay as it is until `flush`. Tensors of other devices pass through the host's memory.
"""

import math
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.errors import StepError, WorkerError
from equipoise.parallel.payload.shared_payload import dumps, loads, pickle_error
from equipoise.pipeline.graph.stages import plain_items
from equipoise.tree import extract_tensors, insert_tensors

__all__ = ["Arrivals", "Messenger", "StageError", "as_late"]

_REMEMBERED = 1 << 16  # bytes; larger headers do not repeat
_SMALL = 1 << 22  # bytes; values of more are not copied into one message, which comes while something is computed
_FOREVER = timedelta(days=3650)


@dataclass(frozen=True)
class StageError:
    """What went wrong in a process, sent in the place of a value.

    Attributes:
        stage: The stage that it computes.
        device: Where.
        error: The error, pickled; None if that cannot be sent.
        text: Its traceback.
    """

    stage: int
    device: str
    error: bytes | None
    text: str

    @classmethod
    def of(cls, error: BaseException, stage: int, device: torch.device) -> "StageError":
        """The failure that an error is."""
        text = "".join(traceback.format_exception(error))
        return cls(stage, str(device), pickle_error(error), text)

    def as_error(self) -> BaseException:
        """The error, as it is raised in another process."""
        told = f"This was stage {self.stage}, on {self.device}, in a process of its own:\n\n{self.text}"
        if self.error is None:
            return WorkerError(told)
        error: BaseException = cloudpickle.loads(self.error)
        error.add_note(told)
        return error


def as_late(error: BaseException, command: str) -> BaseException:
    """An error in a command for which nobody waited, as it is raised when another one is.

    Memory that ran out as an optimiser stepped must not look as if it had in the forward that came next, which could be
    done again while that step would be missing.

    Args:
        error: The error.
        command: What it happened in.
    """
    if not isinstance(error, (RuntimeError, MemoryError)):
        return error
    told = WorkerError(f"{command!r} failed after the first process had gone on, so it cannot be done again: {error}")
    told.__cause__ = error
    return told


class Messenger:
    """Sends values to other processes of the group, and receives theirs; each pair in order, by tag.

    Args:
        timeout: Seconds for which a value that is due is waited for.

    Attributes:
        broken: Whether a message was broken off in its midst, so that nothing that follows could be understood.
        waits: Whether a value is waited for, or that one leaves; for either there is the timeout.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._sent: dict[tuple[int, int], tuple[bytes, int]] = {}  # headers, and the bytes that come with a length
        self._received: dict[tuple[int, int], tuple[bytes, int]] = {}
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self._coming: dict[tuple[int, int], tuple[Any, Tensor]] = {}
        self.broken = False
        self.waits = False

    def send(self, to: int, tag: int, value: Any) -> None:
        """Sends a value without waiting.

        Args:
            to: The rank.
            tag: Which of the ways to it.
            value: Nested tuples, lists and dictionaries of tensors, and whatever else can be pickled.
        """
        tree, tensors = extract_tensors(value, plain_items)
        header = dumps((tree, [(tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors]))
        (known, along), way = self._sent.get((to, tag), (b"", 0)), (to, tag)
        parts = [_bytes_of(tensor) for tensor in tensors if tensor.numel()]
        size = sum(map(len, parts))
        body = [torch.cat(parts)] if parts and size <= _SMALL else parts
        if known == header:
            contents = [torch.cat([_ZERO, *body])] if along else [_ZERO, *body]
        else:
            length = torch.tensor([len(header)]).view(torch.uint8)
            contents = [torch.cat([length, torch.zeros(along, dtype=torch.uint8)])]
            contents += [torch.frombuffer(bytearray(header), dtype=torch.uint8), *body]
            self._sent[way] = _remembered(header, size)
        with self._whole():
            for content in contents:
                self._leaving.append((dist.isend(content, to, tag=tag), content))
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def hand_on(self, to: int, tag: int, value: Any, where: tuple[int, torch.device]) -> StageError | None:
        """Sends what a stage made; or why that cannot be sent, which is returned.

        Args:
            to: The rank.
            tag: Which of the ways to it.
            value: What it made.
            where: The stage and its device.
        """
        try:
            self.send(to, tag, value)
        except BaseException as error:
            if self.broken:
                raise
            told = StepError(
                f"A stage hands on what cannot be sent to another process: {error}. Let the network's blocks exchange"
                " tensors, tuples, lists and dictionaries of them, cut elsewhere, or take engine='threads'."
            )
            failure = StageError.of(told, *where)
            self.send(to, tag, failure)
            return failure
        return None

    def expect(self, source: int, tag: int) -> None:
        """Lets the next value come while something else is computed; it must be received then.

        Args:
            source: The rank.
            tag: Which of the ways from it.
        """
        way = (source, tag)
        buffer = torch.empty(8 + self._received.get(way, (b"", 0))[1], dtype=torch.uint8)
        with self._whole():
            self._coming[way] = (dist.irecv(buffer, source, tag=tag), buffer)

    def receive(self, source: int, tag: int, *, idle: bool = False) -> Any:
        """Waits for a value.

        Args:
            source: The rank.
            tag: Which of the ways from it.
            idle: Whether nothing is due, and one waits as long as it takes. Default: False.
        """
        way = (source, tag)
        if way not in self._coming:
            self.expect(source, tag)
        known, _ = self._received.get(way, (b"", 0))
        with self._whole(), self._waiting():
            work, first = self._coming.pop(way)
            work.wait(_FOREVER if idle else self._timeout)
            length = int(first[:8].view(torch.int64))
            header = self._await(torch.empty(length, dtype=torch.uint8), way).numpy().tobytes() if length else known
            tree, kinds = loads(header)
            size = sum(dtype.itemsize * math.prod(shape) for dtype, shape, _ in kinds)
            if length:
                self._received[way] = _remembered(header, size)
            if 0 < size <= _SMALL:
                body = first[8:] if not length else self._await(torch.empty(size, dtype=torch.uint8), way)
                tensors = list(_cut(body, kinds))
            else:
                tensors = [self._tensor(dtype, shape, learns, way) for dtype, shape, learns in kinds]
        return insert_tensors(tree, tensors, plain_items)

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, way: tuple[int, int]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            self._await(tensor.view(-1).view(torch.uint8), way)
        return tensor.requires_grad_(requires_grad)

    def _await(self, buffer: Tensor, way: tuple[int, int]) -> Tensor:
        source, tag = way
        work = dist.irecv(buffer, source, tag=tag)
        assert work is not None
        work.wait(self._timeout)
        return buffer

    def flush(self) -> None:
        """Waits until everything has left, so that it may be changed."""
        with self._whole(), self._waiting():
            while self._leaving:
                self._leaving.popleft()[0].wait(self._timeout)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.waits = True
        try:
            yield
        finally:
            self.waits = False

    @contextmanager
    def _whole(self) -> Iterator[None]:
        if self.broken:
            raise WorkerError("Connection to the other processes of the pipeline is broken.")
        try:
            yield
        except BaseException:
            self.broken = True
            raise


class Arrivals:
    """Values that are going to be received, by each way in order: the next of each comes while others are computed.

    Args:
        messenger: Receives them.
        ways: The source and tag of every one.
    """

    def __init__(self, messenger: Messenger, ways: Iterable[tuple[int, int]]) -> None:
        self._messenger, self._left = messenger, Counter(ways)
        for way in self._left:
            messenger.expect(*way)

    def receive(self, source: int, tag: int) -> Any:
        """Waits for a value; see `Messenger.receive`."""
        value = self._messenger.receive(source, tag)
        self._left[source, tag] -= 1
        if self._left[source, tag]:
            self._messenger.expect(source, tag)
        return value


_ZERO = torch.zeros(8, dtype=torch.uint8)


def _remembered(header: bytes, size: int) -> tuple[bytes, int]:
    """What both sides keep of a message: the header if it may repeat, and the bytes that then come with the length."""
    return (header, size if size <= _SMALL else 0) if len(header) < _REMEMBERED else (b"", 0)


def _cut(body: Tensor, kinds: Sequence[tuple[torch.dtype, tuple[int, ...], bool]]) -> Iterator[Tensor]:
    """The tensors in a message; each in memory of its own, aligned."""
    begin = 0
    for dtype, shape, learns in kinds:
        end = begin + dtype.itemsize * math.prod(shape)
        yield body[begin:end].clone().view(dtype).view(shape).requires_grad_(learns)
        begin = end


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)
