"""The line of the program that created a tensor."""

import inspect
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor

from equipoise.interop.torch.dispatch import OperationWatch, tensors_in
from equipoise.memory.leaks.references import is_of_user

__all__ = ["Origins"]

_LOOPS = ("equipoise", "lightning", "pytorch_lightning")  # who calls the user's code; above them stands `trainer.fit`


class Origins:
    """Notes, while it is on, for each tensor the line of the user's that wrote it last.

    Example:
        >>> import torch
        >>> origins = Origins()
        >>> origins.start()
        >>> ones = torch.ones(2)
        >>> origins.stop()
        >>> origins.of(torch.ones(2))
        ''
    """

    def __init__(self) -> None:
        self._lines: dict[int, tuple[weakref.ref[Any], str]] = {}  # by the id of the storage
        self._watch = OperationWatch(self._saw)

    def start(self) -> None:
        """Begins to note; may be called twice."""
        self._watch.start()

    def stop(self) -> None:
        """Ends it; may be called twice."""
        self._watch.stop()

    def of(self, tensor: Tensor) -> str:
        """Where a tensor was written, as "file:line"; empty if it was not seen."""
        storage = _storage_of(tensor)
        seen, line = self._lines.get(id(storage), (None, ""))
        return line if seen is not None and seen() is storage else ""

    def _saw(self, name: str, result: Any, args: Any) -> None:
        line = _line_of_user()
        for tensor in tensors_in(result):
            storage = _storage_of(tensor)
            if line or not self.of(tensor):  # what a logger does with it, such as detach, is not worth telling
                self._lines[id(storage)] = (weakref.ref(storage), line)


def _storage_of(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or of another library's kind
        return tensor


def _line_of_user() -> str:
    frame = inspect.currentframe()
    frame = frame.f_back.f_back.f_back if frame and frame.f_back and frame.f_back.f_back else None  # past this module
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_user(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        if frame.f_globals.get("__name__", "").partition(".")[0] in _LOOPS:
            return ""
        frame = frame.f_back
    return ""
