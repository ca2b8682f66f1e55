"""Call a function in a process of its own that has a bound of time, and ends with all that it has started.

The server of worker processes forks it (see `preloading`), so the first one of a program takes some seconds to start
and later ones a tenth of one.
"""

import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, current_process, get_context, get_start_method, parent_process, set_start_method
from pathlib import Path
from typing import Any

from equipoise.errors import ConfigurationError, in_one_line
from equipoise.formats import format_span
from equipoise.parallel.workers.main_script import hidden
from equipoise.parallel.workers.preloading import preload, preloading

__all__ = ["CallError", "call_bounded"]

# Exit code of a process whose server cannot tell how it ended.
_SERVER_HAS_ENDED = 255
# Seconds between two looks at what a process has printed.
_BETWEEN_LOOKS = 0.2
# Files of a call in its folder: function and arguments, the result, and what the process prints.
_CALL = "call"
_RESULT = "result"
_OUTPUT = "output.txt"


class CallError(Exception):
    """A call that has no result, with the reason in one line.

    Args:
        reason: The reason.
        is_raised: Whether the function has raised an error; otherwise its process did not get as far. Default: False.
        is_wrong_input: Whether that error is a `ConfigurationError`. Default: False.
        output: Text that the process has printed. Default: none.
    """

    def __init__(self, reason: str, *, is_raised: bool = False, is_wrong_input: bool = False, output: str = "") -> None:
        super().__init__(reason)
        self.is_raised = is_raised
        self.is_wrong_input = is_wrong_input
        self.output = output


@dataclass(frozen=True)
class _Result:
    """The message of the process at its end.

    Attributes:
        value: The value that the function has returned.
        reason: The error that it has raised instead, in one line; None if it has returned.
        is_wrong_input: Whether that is a `ConfigurationError`.
    """

    value: Any = None
    reason: str | None = None
    is_wrong_input: bool = False


def call_bounded(
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float,
    paths: Sequence[str] = (),
    option: str = "",
    explain: Callable[[Exception], str] = in_one_line,
    progress: str = "",
) -> Any:
    """Call a function in a new process and return what it returns.

    The process imports what this one can import. Nothing that it has started outlives it, and it does not outlive this
    process.

    Args:
        function: A function of a module. The server imports its module in advance.
        arguments: Arguments of the function, which are pickled, as its result is.
        timeout: Seconds after which the process is ended, from the call on.
        paths: Folders from which it imports before all others. Default: none.
        option: The option by which the user sets the bound, for the message. Default: none.
        explain: Function of a module that returns the reason for an error of the function. Default: its type and the
            first line of its message.
        progress: How lines begin that the process prints, and that this one prints to its error output meanwhile.
            Default: none.

    Raises:
        CallError: If the function raises an error, or its process does not get as far.

    Example:
        >>> call_bounded(len, "abc", timeout=60)
        3
    """
    if current_process().daemon:
        raise CallError("this process is a daemon of multiprocessing, which may not start another")
    deadline = time.monotonic() + timeout
    # The folder belongs to this user alone, and disappears with what is in it.
    with tempfile.TemporaryDirectory(prefix="equipoise-call-") as name:
        folder = Path(name)
        # 1. The call goes through a file: a pipe would block this process until the other one has read it.
        (folder / _CALL).write_bytes(pickle.dumps((function, arguments, explain)))

        # 2. The process. An empty entry of the path is the present folder.
        path = [entry or os.getcwd() for entry in (*paths, *sys.path)]
        preload(function.__module__)
        reason = _run_until(deadline, folder, path, progress) or f"it took longer than {format_span(timeout)}{option}"

        # 3. The result. A process that hangs at its very end has left it before.
        result = None
        result_file = folder / _RESULT
        if result_file.is_file():
            result = pickle.loads(result_file.read_bytes())  # noqa: S301 - from the process of the call
        output = ""
        output_file = folder / _OUTPUT
        if output_file.is_file():
            output = output_file.read_text(encoding="utf-8", errors="replace")
    if result is None:
        raise CallError(reason, output=output)
    if result.reason is not None:
        raise CallError(result.reason, is_raised=True, is_wrong_input=result.is_wrong_input, output=output)
    return result.value


def _run_until(deadline: float, folder: Path, path: list[str], progress: str) -> str | None:
    """Run the process and return how it ended; None if it had to be ended."""
    # The environment of the server is as old as the server.
    arguments = (folder, path, get_start_method(allow_none=True), dict(os.environ))
    process = get_context("forkserver").Process(target=_run, args=arguments)
    try:
        _start(process)
        _wait(process, deadline, folder / _OUTPUT, progress)
        code = process.exitcode
    except (OSError, EOFError) as error:
        return f"its process could not be started: {type(error).__name__}: {error}"
    finally:
        _end(process)
    if code is None:
        return None
    return _why_ended(code)


def _wait(process: Any, deadline: float, output: Path, progress: str) -> None:
    """Wait for a process, and print the lines of its output that tell its progress."""
    printed = 0
    while process.exitcode is None and (left := deadline - time.monotonic()) > 0:
        process.join(min(left, _BETWEEN_LOOKS) if progress else left)
        if progress and output.is_file():
            text = output.read_text(encoding="utf-8", errors="replace")
            lines = [line for line in text.splitlines(keepends=True) if line.startswith(progress) and line[-1] == "\n"]
            sys.stderr.write("".join(lines[printed:]))
            sys.stderr.flush()
            printed = len(lines)


def _start(process: Any) -> None:
    """Start a process. The program may still choose later how multiprocessing starts processes."""
    has_chosen = get_start_method(allow_none=True) is not None
    try:
        with hidden(), preloading():
            process.start()
    finally:
        if not has_chosen:
            set_start_method(None, force=True)


def _run(folder: Path, path: list[str], start_method: str | None, environment: dict[str, str]) -> None:
    """Call the function of a folder in the process, with settings of the parent."""
    # 1. A session of its own: Ctrl-C reaches the process through its parent alone.
    os.setsid()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # 2. The process reads nothing, and what it and its processes print belongs to the file.
    with (folder / _OUTPUT).open("wb") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # 3. It finds variables and modules where the parent does. Its imports write no files.
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = path
    sys.dont_write_bytecode = True
    set_start_method(start_method, force=True)
    # 4. The call, which may import the user's modules.
    content = (folder / _CALL).read_bytes()
    function, arguments, explain = pickle.loads(content)  # noqa: S301 - from the process that started this one
    try:
        result = _Result(function(*arguments))
    except Exception as error:
        traceback.print_exc()
        result = _Result(reason=explain(error), is_wrong_input=isinstance(error, ConfigurationError))
    # 5. The result. A file that exists is complete.
    unfinished = folder / f"{_RESULT}.part"
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.rename(folder / _RESULT)


def _end_with_parent() -> None:
    """End this process when its parent has ended."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _end(process: Any) -> None:
    """End a process and all processes that it has started."""
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


def _why_ended(code: int) -> str:
    """Return in words how a process ended, from its exit code."""
    if code == 0:
        return "its process left no result"
    if code == _SERVER_HAS_ENDED:
        return "its process ended, or the server that starts processes was ended"
    if code > 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        return "its process was ended by SIGKILL, as when the memory of the host is exhausted"
    return f"its process was ended by {name}"
