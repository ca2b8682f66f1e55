"""Save in the background, one checkpoint after the other, while the training continues."""

import threading
from collections.abc import Callable

from equipoise.errors import CheckpointError

__all__ = ["InBackground"]


class InBackground:
    """Runs one function at a time in a thread.

    Args:
        name: Name of the thread.

    Example:
        >>> done = []
        >>> background = InBackground("saving")
        >>> background.start(lambda: done.append(1))
        >>> background.wait()
        >>> done
        [1]
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """True from `start` to the next `wait`."""
        return self._thread is not None

    def start(self, function: Callable[[], None]) -> None:
        """Run a function in the thread, once the last one has ended.

        Args:
            function: The function.

        Raises:
            BaseException: The error of the last one.
        """
        self.wait()

        def run() -> None:
            try:
                function()
            except BaseException as error:
                self._error = error

        # A thread that hangs must not keep the process.
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until the function has ended.

        Args:
            seconds: The longest time. Default: None, without limit.

        Raises:
            CheckpointError: If it takes longer.
            BaseException: The error of the function.
        """
        if self._thread is None:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise CheckpointError(
                f"The last checkpoint was not complete after {seconds:.0f} seconds, so it is missing."
            )
        self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise error
