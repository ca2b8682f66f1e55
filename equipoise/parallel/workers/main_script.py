"""The user's script as workers find it in `__main__`: a file or a module.

Workers that `launch` starts do not run it again: it is hidden while they start. In them it is shown afterwards, since a
loader that starts its own workers by "spawn" or "forkserver" lets those import it, to find the classes of its data.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from typing import NamedTuple

__all__ = ["MainScript", "hidden", "main_script"]

# Workers of one thread must not start while another thread shows the script again.
_HIDING = threading.Lock()


class MainScript(NamedTuple):
    """Script of a process.

    Attributes:
        file: Path of the script; None without one, as in a notebook.
        module: Full name of the script if it was started as a module.
    """

    file: str | None
    module: str | None

    def show(self) -> None:
        """Let multiprocessing find the script in this process, for the processes that this one starts."""
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None)
        spec = main.__spec__
        if self.file is not None:
            file = self.file
        if self.module is not None:
            spec = ModuleSpec(self.module, None)
        _write_main(file, spec)


def main_script() -> MainScript:
    """Return the script of this process."""
    with _HIDING:
        main = sys.modules["__main__"]
        return MainScript(getattr(main, "__file__", None), getattr(main.__spec__, "name", None))


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Keep multiprocessing from importing the script in processes that start meanwhile, where it would run once more.

    Example:
        >>> with hidden():
        ...     main_is_found = hasattr(sys.modules["__main__"], "__file__")
        >>> main_is_found
        False
    """
    main = sys.modules["__main__"]
    with _HIDING:
        file = getattr(main, "__file__", None)
        spec = main.__spec__
        _write_main(None, None)
        try:
            yield
        finally:
            _write_main(file, spec)


def _write_main(file: str | None, spec: ModuleSpec | None) -> None:
    """Set the attributes by which multiprocessing finds the script of this process."""
    main = sys.modules["__main__"]
    main.__spec__ = spec
    if file is not None:
        main.__file__ = file
    else:
        vars(main).pop("__file__", None)
