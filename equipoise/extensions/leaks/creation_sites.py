"""Creation sites of tensors: lines of the user's program."""

import inspect
import weakref
from pathlib import Path
from typing import Any

from torch import Tensor

from equipoise.extensions.leaks.references import is_of_user
from equipoise.interop.torch.dispatch import OperationWatch, tensors_in

__all__ = ["CreationSites"]

# Packages that call the user's code. The line above them in the stack is `trainer.fit`.
_CALLERS = ("equipoise", "lightning", "pytorch_lightning")
# Frames from `_line_of_user` to the operation: this function, `_on_operation`, and the watch that calls it.
_OWN_FRAMES = 3


class CreationSites:
    """Records for each tensor the line of the user's program that wrote it last, from `start` to `stop`.

    Example:
        >>> import torch
        >>> sites = CreationSites()
        >>> sites.start()
        >>> ones = torch.ones(2)
        >>> sites.stop()
        >>> sites.of(torch.ones(2))
        ''
    """

    def __init__(self) -> None:
        # Lines by the id of the storage, which may belong to another storage later.
        self._lines: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._watch = OperationWatch(self._on_operation)

    def start(self) -> None:
        """Begin to record; may be called twice."""
        self._watch.start()

    def stop(self) -> None:
        """Stop recording; may be called twice."""
        self._watch.stop()

    def of(self, tensor: Tensor) -> str:
        """Return the line that wrote a tensor, as "file:line"; empty if unknown."""
        storage = _storage_of(tensor)
        reference_and_line = self._lines.get(id(storage))
        if reference_and_line is None:
            return ""
        reference, line = reference_and_line
        if reference() is not storage:
            return ""
        return line

    def _on_operation(self, name: str, result: Any, args: Any) -> None:
        line = _line_of_user()
        for tensor in tensors_in(result):
            # An operation of a library, such as a logger's `detach`, does not hide the user's line.
            if line or not self.of(tensor):
                storage = _storage_of(tensor)
                self._lines[id(storage)] = (weakref.ref(storage), line)


def _storage_of(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        # The tensor is sparse, or of a class from another library.
        return tensor


def _line_of_user() -> str:
    """Return the innermost line of the user's program below the training loop, empty without one."""
    frame = inspect.currentframe()
    for _ in range(_OWN_FRAMES):
        if frame is not None:
            frame = frame.f_back
    while frame is not None:
        file = frame.f_code.co_filename
        if is_of_user(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _CALLERS:
            return ""
        frame = frame.f_back
    return ""
