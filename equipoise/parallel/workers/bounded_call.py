"""Call a function in a process of its own that has a bound of time, and ends with all that it has started.

The server of worker processes forks it (see `preloading`), so the first one of a program takes some seconds to start
and later ones a tenth of one.
"""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import connection, current_process, get_context, get_start_method, parent_process, set_start_method
from pathlib import Path
from typing import Any

from equipoise.formats import format_span
from equipoise.parallel.workers.main_script import hidden
from equipoise.parallel.workers.preloading import preload, preloading

__all__ = ["call_bounded"]

# Exit code of a process whose server cannot tell how it ended.
_SERVER_HAS_ENDED = 255


@dataclass(frozen=True)
class _Settings:
    """Settings of the process.

    Attributes:
        output: File that receives what it prints.
        path: Folders from which it imports.
        start_method: How multiprocessing starts processes in the parent; None if the program has not chosen yet.
        environment: The parent's environment variables. Those of the server are as old as the server.
    """

    output: Path
    path: list[str]
    start_method: str | None
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))


def call_bounded(
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float,
    output: Path,
    paths: Sequence[str] = (),
    option: str = "",
) -> str | None:
    """Call a function in a new process and return the reason why it failed; None if the function has returned.

    The process imports what this one can import. Nothing that it has started outlives it, and it does not outlive this
    process. What the function returns is dropped: it writes its results to a file.

    Args:
        function: A function of a module. The server imports its module in advance.
        arguments: Arguments of the function, which are pickled.
        timeout: Seconds after which the process is ended, from the call on.
        output: File that receives what it prints. Its folder exists.
        paths: Folders from which it imports before all others. Default: none.
        option: The option by which the user sets the bound, for the message. Default: none.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     call_bounded(sys.exit, 3, timeout=60, output=Path(folder, "output.txt"))
        'its process ended with exit code 3'
    """
    if current_process().daemon:
        return "this process is a daemon of multiprocessing, which may not start another"
    deadline = time.monotonic() + timeout

    # 1. The call goes through a file: a pipe would block this process until the other one has read it.
    call = output.with_name(f"{output.name}.call")
    call.write_bytes(pickle.dumps((function, arguments)))

    # 2. The process. An empty entry of the path is the present folder.
    path = [entry or os.getcwd() for entry in (*paths, *sys.path)]
    settings = _Settings(output, path, get_start_method(allow_none=True))
    preload(function.__module__)
    process = get_context("forkserver").Process(target=_run, args=(settings, call))
    try:
        _start(process)
        process.join(max(0.0, deadline - time.monotonic()))
        code = process.exitcode
    except (OSError, EOFError) as error:
        return f"its process could not be started: {type(error).__name__}: {error}"
    finally:
        _end(process)
        call.unlink(missing_ok=True)
    if code is None:
        return f"it took longer than {format_span(timeout)}{option}"
    return _why_ended(code)


def _start(process: Any) -> None:
    """Start a process. The program may still choose later how multiprocessing starts processes."""
    has_chosen = get_start_method(allow_none=True) is not None
    try:
        with hidden(), preloading():
            process.start()
    finally:
        if not has_chosen:
            set_start_method(None, force=True)


def _run(settings: _Settings, call: Path) -> None:
    """Call the function in the process."""
    # 1. A session of its own: Ctrl-C reaches the process through its parent alone.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # 2. The process reads nothing, and what it and its processes print belongs to the file.
    with settings.output.open("wb") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # 3. It finds variables and modules where the parent does. Its imports write no files.
    os.environ.clear()
    os.environ.update(settings.environment)
    sys.path[:] = settings.path
    sys.dont_write_bytecode = True
    set_start_method(settings.start_method, force=True)
    # 4. The call, which may import the user's modules.
    function, arguments = pickle.loads(call.read_bytes())  # noqa: S301 - from the process that started this one
    function(*arguments)


def _end_with_parent() -> None:
    """End this process when its parent has ended."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _end(process: Any) -> None:
    """End a process, and what it has started."""
    if process.pid is None:
        # It was interrupted before it started.
        return
    # Data loaders and workers of a strategy belong to its group. A process that ended by itself keeps its exit code.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # It may not have got as far as a group of its own.
    process.kill()
    process.join()
    process.close()


def _why_ended(code: int) -> str | None:
    """Return the reason why a process failed, from its exit code; None for 0."""
    if code == 0:
        return None
    if code == _SERVER_HAS_ENDED:
        return "its process ended, or the server that starts processes was ended"
    if code > 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        return "its process was ended by SIGKILL, as when the memory of the host is exhausted"
    return f"its process was ended by {name}"
