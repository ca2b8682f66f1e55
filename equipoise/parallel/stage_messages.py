"""Values on their way between the processes of a pipeline: any nesting of tensors, of any sizes.

    a length      0 where the next part is the same as last time on this way
    a header      the value without its tensors, and their dtypes and shapes
    the tensors   as bytes, one message each

In a pipeline's steady state headers repeat, so a value costs one small message beside its tensors. Sending never waits:
what is sent must stay as it is until `flush`. Tensors of other devices pass through the memory of the host.
"""

import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor

from equipoise.errors import WorkerError
from equipoise.parallel.stages import map_tensors
from equipoise.parallel.transport import dumps, loads

__all__ = ["Failure", "Messenger"]

_REMEMBERED = 1 << 16  # bytes; larger headers do not repeat
_FOREVER = timedelta(days=3650)


@dataclass(frozen=True)
class Failure:
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
    def of(cls, error: BaseException, stage: int, device: torch.device) -> "Failure":
        """The failure that an error is."""
        text = "".join(traceback.format_exception(error))
        plain = error.with_traceback(None)
        plain.__cause__ = plain.__context__ = None
        try:
            pickled = cloudpickle.dumps(plain)
            cloudpickle.loads(pickled)
        except Exception:
            pickled = None
        return cls(stage, str(device), pickled, text)

    def as_error(self) -> BaseException:
        """The error, as it is raised in another process."""
        told = f"This was stage {self.stage}, on {self.device}, in a process of its own:\n\n{self.text}"
        if self.error is None:
            return WorkerError(told)
        error: BaseException = cloudpickle.loads(self.error)
        error.add_note(told)
        return error


@dataclass(frozen=True)
class _Slot:
    """Where a tensor goes."""

    index: int


class Messenger:
    """Sends values to other processes of the group, and receives theirs; each pair in order, by tag.

    Args:
        timeout: Seconds for which a value that is due is waited for.

    Attributes:
        broken: Whether a message was broken off in its midst, so that nothing that follows could be understood.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timedelta(seconds=timeout)
        self._sent: dict[tuple[int, int], bytes] = {}
        self._received: dict[tuple[int, int], bytes] = {}
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self.broken = False

    def send(self, to: int, tag: int, value: Any) -> None:
        """Sends a value without waiting.

        Args:
            to: The rank.
            tag: Which of the ways to it.
            value: Nested tuples, lists and dictionaries of tensors, and whatever else can be pickled.
        """
        tensors: list[Tensor] = []

        def take(tensor: Tensor) -> _Slot:
            tensors.append(tensor)
            return _Slot(len(tensors) - 1)

        tree = map_tensors(take, value)
        header = dumps((tree, [(tensor.dtype, tuple(tensor.shape), tensor.requires_grad) for tensor in tensors]))
        way = (to, tag)
        same = self._sent.get(way) == header
        contents = [torch.tensor([0 if same else len(header)])]
        if not same:
            contents.append(torch.frombuffer(bytearray(header), dtype=torch.uint8))
            self._sent[way] = header if len(header) < _REMEMBERED else b""
        contents += [_bytes_of(tensor) for tensor in tensors if tensor.numel()]
        with self._whole():
            for content in contents:
                self._leaving.append((dist.isend(content, to, tag=tag), content))
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def receive(self, source: int, tag: int, *, idle: bool = False) -> Any:
        """Waits for a value.

        Args:
            source: The rank.
            tag: Which of the ways from it.
            idle: Whether nothing is due, and one waits as long as it takes. Default: False.
        """
        way = (source, tag)
        length = torch.empty(1, dtype=torch.int64)
        with self._whole():
            self._await(length, way, _FOREVER if idle else self._timeout)
            if size := int(length):
                content = self._await(torch.empty(size, dtype=torch.uint8), way)
                header = content.numpy().tobytes()
                self._received[way] = header if size < _REMEMBERED else b""
            else:
                header = self._received[way]
            tree, kinds = loads(header)
            tensors = [self._tensor(dtype, shape, learns, way) for dtype, shape, learns in kinds]
        return _filled(tree, tensors)

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, way: tuple[int, int]) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.numel():
            self._await(tensor.view(-1).view(torch.uint8), way)
        return tensor.requires_grad_(requires_grad)

    def _await(self, buffer: Tensor, way: tuple[int, int], timeout: timedelta | None = None) -> Tensor:
        source, tag = way
        work = dist.irecv(buffer, source, tag=tag)
        assert work is not None
        work.wait(timeout or self._timeout)
        return buffer

    def flush(self) -> None:
        """Waits until everything has left, so that it may be changed."""
        with self._whole():
            while self._leaving:
                self._leaving.popleft()[0].wait(self._timeout)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        if self.broken:
            raise WorkerError("Connection to the other processes of the pipeline is broken.")
        try:
            yield
        except BaseException:
            self.broken = True
            raise


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def _filled(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, _Slot):
        return tensors[tree.index]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_filled(item, tensors) for item in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(_filled(item, tensors) for item in tree)
    if isinstance(tree, dict):
        return {key: _filled(item, tensors) for key, item in tree.items()}
    return tree
