"""Messages between the processes of a pipeline: nested tensors of any sizes, and errors.

    a length      0 if the header is the same as that of the message before; small tensors then follow in this message
    a header      the value without its tensors, and their dtypes, shapes and strides
    the tensors   as bytes: small ones in one message, otherwise each in a message of its own

In a pipeline's steady state headers repeat, so a small value is one message. Gloo sends nothing before the receiver has
memory for it. So that a message need not wait until the receiver needs it, `expect` provides that memory earlier.
Sending never waits: the tensors of a message must not change until `flush`. Tensors of other devices pass through the
host's memory.
"""

import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.errors import WorkerError
from equipoise.extensions.pipeline.graph.stages import plain_items
from equipoise.extensions.pipeline.messaging.tensor_memory import (
    TensorKind,
    as_sent,
    bytes_of,
    kind_of,
    size_of,
    split_body,
    tensor_of,
)
from equipoise.parallel.payload.object_bytes import dumps, loads, pickle_error
from equipoise.tree import extract_tensors, insert_tensors

__all__ = ["Messenger", "StageError", "Way", "as_late"]

# Rank of the other process, and the tag of the messages.
Way = tuple[int, int]

# Bytes of the longest header that is remembered; longer ones hardly repeat.
_LONGEST_HEADER = 1 << 16
# Bytes of tensors that are copied into one message. Larger ones are sent as they are, while others are computed.
_LARGEST_BODY = 1 << 22
_LENGTH_BYTES = 8
_FOREVER = timedelta(days=3650)


@dataclass(frozen=True)
class StageError:
    """Error of a process, sent in the place of a value.

    Attributes:
        stage: The stage that failed.
        device: Its device.
        error: The error, pickled; None if that is impossible.
        text: Its traceback.
    """

    stage: int
    device: str
    error: bytes | None
    text: str

    @classmethod
    def of(cls, error: BaseException, stage: int, device: torch.device) -> "StageError":
        """Return an error as it can be sent."""
        text = "".join(traceback.format_exception(error))
        return cls(stage, str(device), pickle_error(error), text)

    def as_error(self) -> BaseException:
        """Return the error as it is raised in another process."""
        message = f"This was stage {self.stage}, on {self.device}, in a process of its own:\n\n{self.text}"
        if self.error is None:
            return WorkerError(message)
        error: BaseException = cloudpickle.loads(self.error)
        error.add_note(message)
        return error


def as_late(error: BaseException, command: str) -> BaseException:
    """Return the error of a command without reply, as it is raised by a later command.

    Suppose that memory runs out in an optimiser's step, which has no reply. If this error looked like one of the next
    forward, that forward would be repeated, and the optimiser's step would be missing.

    Args:
        error: The error.
        command: Name of the command that failed.
    """
    if not isinstance(error, (RuntimeError, MemoryError)):
        return error
    late = WorkerError(f"{command!r} failed after the first process had continued, so it cannot be done again: {error}")
    late.__cause__ = error
    return late


class _LastHeader(NamedTuple):
    """Header of the last message of a way, which both sides remember.

    Attributes:
        content: The header; empty if it is too long to be remembered.
        body_size: Bytes of tensors that follow the length in the same message, if the header repeats.
    """

    content: bytes
    body_size: int


_NO_HEADER = _LastHeader(b"", 0)


class Messenger:
    """Sends values to other processes of the group, and receives theirs. Values of one way arrive in order.

    Args:
        timeout: Longest time in seconds for which a value is awaited that is due.
        group: The processes, whose ranks in it name them. Default: torch's default group.

    Attributes:
        broken: True after a message was interrupted, so that nothing after it could be understood.
    """

    def __init__(self, timeout: float, group: dist.ProcessGroup | None = None) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._group = group
        self._sent: dict[Way, _LastHeader] = {}
        self._received: dict[Way, _LastHeader] = {}
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self._coming: dict[Way, tuple[Any, Tensor]] = {}
        # Work of the last message. Gloo's thread may still hold it when it has arrived, and its destructor would wait
        # for that thread.
        self._arrived: Any = None
        self.broken = False

    # Sending.

    def send(self, to: int, tag: int, value: Any) -> None:
        """Send a value without waiting.

        Args:
            to: Rank of the receiver.
            tag: Tag of the message.
            value: Nested tuples, lists and dictionaries of tensors and anything that can be pickled.
        """
        # 1. Take the tensors out of the value.
        tree, tensors = extract_tensors(value, plain_items)
        tensors = list(map(as_sent, tensors))
        header = dumps((tree, [kind_of(tensor) for tensor in tensors]))

        # 2. Join small tensors.
        body = [bytes_of(tensor) for tensor in tensors if tensor.numel()]
        size = sum(map(len, body))
        if body and size <= _LARGEST_BODY:
            body = [torch.cat(body)]

        # 3. Send the messages.
        contents = self._messages((to, tag), header, body, size)
        with self._unbroken():
            for content in contents:
                self._leaving.append((dist.isend(content, group=self._group, group_dst=to, tag=tag), content))

        # 4. Drop what has left.
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def _messages(
        self,
        way: Way,
        header: bytes,
        body: list[Tensor],
        size: int,
    ) -> list[Tensor]:
        last = self._sent.get(way, _NO_HEADER)
        if last.content == header:
            if last.body_size:
                return [torch.cat([_ZERO_LENGTH, *body])]
            return [_ZERO_LENGTH, *body]
        self._sent[way] = _remembered(header, size)
        length = torch.tensor([len(header)]).view(torch.uint8)
        # The receiver expects as many bytes as if the header were repeated.
        first = torch.cat([length, torch.zeros(last.body_size, dtype=torch.uint8)])
        return [first, torch.frombuffer(bytearray(header), dtype=torch.uint8), *body]

    def flush(self) -> None:
        """Wait until all values have left, so that they may change."""
        with self._unbroken():
            while self._leaving:
                work, _ = self._leaving.popleft()
                work.wait(self._timeout)

    # Receiving.

    def expect(self, source: int, tag: int) -> None:
        """Let the next value arrive while something else is computed. It must be received afterwards.

        Args:
            source: Rank of the sender.
            tag: Tag of the message.
        """
        way = (source, tag)
        buffer = torch.empty(_LENGTH_BYTES + self._received.get(way, _NO_HEADER).body_size, dtype=torch.uint8)
        with self._unbroken():
            self._coming[way] = (self._begin_receiving(buffer, way), buffer)

    def receive(self, source: int, tag: int, *, idle: bool = False) -> Any:
        """Wait for a value.

        Args:
            source: Rank of the sender.
            tag: Tag of the message.
            idle: Whether no value is due, so that there is no timeout. Default: False.
        """
        way = (source, tag)
        if way not in self._coming:
            self.expect(source, tag)
        with self._unbroken():
            # 1. Receive the length.
            work, first = self._coming.pop(way)
            work.wait(_FOREVER if idle else self._timeout)
            self._arrived = work
            length = int(first[:_LENGTH_BYTES].view(torch.int64))

            # 2. Receive the header, unless it is the last one.
            repeats = length == 0
            if repeats:
                header = self._received[way].content
            else:
                header = self._await(torch.empty(length, dtype=torch.uint8), way).numpy().tobytes()
            tree, kinds = loads(header)
            size = sum(map(size_of, kinds))
            if not repeats:
                self._received[way] = _remembered(header, size)

            # 3. Receive the tensors.
            if size == 0 or size > _LARGEST_BODY:
                tensors = [self._receive_tensor(kind, way) for kind in kinds]
            elif repeats:
                tensors = list(split_body(first[_LENGTH_BYTES:], kinds))
            else:
                body = self._await(torch.empty(size, dtype=torch.uint8), way)
                tensors = list(split_body(body, kinds))
        return insert_tensors(tree, tensors, plain_items)

    def _receive_tensor(self, kind: TensorKind, way: Way) -> Tensor:
        memory = torch.empty(size_of(kind), dtype=torch.uint8)
        if memory.numel():
            self._await(memory, way)
        return tensor_of(memory, kind)

    def _await(self, buffer: Tensor, way: Way) -> Tensor:
        work = self._begin_receiving(buffer, way)
        work.wait(self._timeout)
        self._arrived = work
        return buffer

    def _begin_receiving(self, buffer: Tensor, way: Way) -> dist.Work:
        """Let the next message of a way arrive in a buffer."""
        source, tag = way
        work = dist.irecv(buffer, group=self._group, group_src=source, tag=tag)
        assert work is not None
        return work

    # State of the connection.

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Mark the connection as broken if the context is left by an error.

        Raises:
            WorkerError: If the connection is broken already.
        """
        if self.broken:
            raise WorkerError("Connection to the other processes of the pipeline is broken.")
        try:
            yield
        except BaseException:
            self.broken = True
            raise


_ZERO_LENGTH = torch.zeros(_LENGTH_BYTES, dtype=torch.uint8)


def _remembered(header: bytes, size: int) -> _LastHeader:
    """Return the part of a message that both sides remember."""
    if len(header) >= _LONGEST_HEADER:
        return _NO_HEADER
    if size > _LARGEST_BODY:
        return _LastHeader(header, 0)
    return _LastHeader(header, size)
