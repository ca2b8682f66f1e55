"""What a training step does beside computing: pauses between operations of torch, and numbers that it reads."""

from collections.abc import Callable
from inspect import currentframe
from time import perf_counter
from types import FrameType
from typing import Any

from equipoise.interop.torch.dispatch import DispatchMode

__all__ = ["HostWork"]

# The operation behind `.item()`, `float(tensor)` and `if tensor:`.
_READ = "_local_scalar_dense"
# Seconds. What is shorter belongs to the calls.
_LEAST_PAUSE = 0.001


class HostWork:
    """Watches the first calls of the user's `training_step`, which compute the same.

    Args:
        calls: Number of calls.
    """

    def __init__(self, calls: int) -> None:
        self._calls_left = calls
        # Pauses and reads of each.
        self._watched: list[tuple[float, int]] = []

    @property
    def pauses(self) -> float:
        """Seconds of each call in which no operation of torch runs, as far as they last a millisecond or more."""
        # Other programs of the machine interrupt some calls, and not all.
        return min((pauses for pauses, _ in self._watched), default=0.0)

    @property
    def reads(self) -> int:
        """Numbers of tensors that the user's code reads in each call."""
        return min((reads for _, reads in self._watched), default=0)

    def watching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is watched; the function itself if that is over."""
        if not self._calls_left:
            return function

        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self._calls_left:
                return function(*args, **kwargs)
            self._calls_left -= 1
            with _Operations() as operations:
                result = function(*args, **kwargs)
            operations.note_pause()
            self._watched.append((operations.pauses, operations.reads))
            return result

        return watched


class _Operations(DispatchMode):  # type: ignore[misc]
    # Each operation runs as it does without the mode, also those of functions, and what the compiler has made.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.pauses = 0.0
        self.reads = 0
        self._end = perf_counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note_pause()
        if getattr(func, "overloadpacket", func).__name__ == _READ:
            self.reads += not _is_of_torch(currentframe())
        result = func(*args, **(kwargs or {}))
        self._end = perf_counter()
        return result

    def note_pause(self) -> None:
        """Add the seconds since the last operation if they are a pause."""
        pause = perf_counter() - self._end
        if pause >= _LEAST_PAUSE:
            self.pauses += pause


def _is_of_torch(frame: FrameType | None) -> bool:
    """Return whether torch's Python code has called the mode, such as an optimiser that counts its steps."""
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        # Between a caller and the mode are frames of torch's own.
        if not name.startswith((__name__, "torch._")):
            return name.startswith("torch.")
        frame = frame.f_back
    return False
