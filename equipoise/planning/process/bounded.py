"""A Python program in a process of its own, with a bound of time. What it has started ends with it."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from equipoise.formats import format_span

__all__ = ["run_bounded", "why_ended"]


def run_bounded(
    arguments: Sequence[str],
    *,
    input: bytes = b"",
    timeout: float,
    output: Path,
    paths: Sequence[str] = (),
) -> str | None:
    """Run `python ARGUMENTS` and return the reason why it failed; None if it ended by itself, with exit code 0.

    The process imports what this one can import. Nothing that it has started outlives it.

    Args:
        arguments: Arguments of the interpreter, such as `["-m", "package.module"]`.
        input: Bytes for its standard input. Default: none.
        timeout: Seconds after which it is ended.
        output: File that receives what it prints.
        paths: Folders from which it imports before all others. Default: none.
    """
    # A session of its own: Ctrl-C reaches the process through this one alone.
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            env=_environment(paths),
            start_new_session=True,
        )
        try:
            process.communicate(input, timeout)
        except subprocess.TimeoutExpired:
            return f"it took longer than {format_span(timeout)}"
        finally:
            _end(process)
    return why_ended(process.returncode)


def why_ended(code: int) -> str | None:
    """Return the reason why a process failed, from its exit code; None for 0."""
    if code == 0:
        return None
    if code > 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        return "its process was ended by SIGKILL, as when the memory of the host is exhausted"
    return f"its process was ended by {name}"


def _environment(first_paths: Sequence[str]) -> dict[str, str]:
    """Return the environment of the process, which finds modules where this process does."""
    paths = list(first_paths)
    for path in sys.path:
        # An empty entry is the present folder.
        paths.append(path or os.getcwd())
    additions = {
        "PYTHONPATH": os.pathsep.join(paths),
        # Its imports write no files.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return os.environ | additions


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and what it has started."""
    # A process that ended by itself keeps its exit code.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
