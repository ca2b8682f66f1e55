"""A trial in a process of its own, which has a bound: started, awaited, and ended with all that it has started."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import equipoise
from equipoise.app.trials.worker import REQUEST, RESULT
from equipoise.formats import format_span

__all__ = ["run_in_process"]


def run_in_process(program: str, request: Mapping[str, Any], folder: Path, timeout: float) -> dict[str, Any]:
    """Run a trial and return its result.

    Args:
        program: Name of the module that runs trials, as `python -m` takes it.
        request: The trial, as `worker.answer` takes it.
        folder: A new folder for its files.
        timeout: Seconds after which the process is ended.

    Returns:
        The measurements, or under "reason" why there are none.
    """
    # 1. The request.
    folder.mkdir()
    text = json.dumps(request, default=str)
    (folder / REQUEST).write_text(text, encoding="utf-8")

    # 2. The process, in a session of its own: Ctrl-C reaches it through this process alone.
    command = [sys.executable, "-m", program, str(folder)]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(),
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return {"reason": f"it took longer than {format_span(timeout)} (--timeout=SECONDS)"}
        finally:
            _end(process)

    # 3. The result.
    result_file = folder / RESULT
    if result_file.is_file():
        text = result_file.read_text(encoding="utf-8")
        result: dict[str, Any] = json.loads(text)
        return result
    return {"reason": _why_ended(code)}


def _environment() -> dict[str, str]:
    """Return the environment of the process, which imports this package as this process does."""
    package = Path(equipoise.__file__).parent
    paths = [str(package.parent)]
    present = os.environ.get("PYTHONPATH")
    if present:
        paths.append(present)
    joined = os.pathsep.join(paths)
    return os.environ | {"PYTHONPATH": joined}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, and the processes that it has started and that are still there."""
    # Data loaders and processes of a strategy belong to the same group.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _why_ended(code: int) -> str:
    """Return the reason why a process has left no result."""
    if code < 0:
        name = signal.Signals(-code).name
        if name == "SIGKILL":
            return "its process was ended by SIGKILL, as when the memory of the host is exhausted"
        return f"its process was ended by {name}"
    return f"its process ended with exit code {code}"
