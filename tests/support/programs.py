"""Python programs that start at once: forks of a server that has torch, Lightning and the trainer imported.

An interpreter imports all of these anew, which takes many seconds of a processor. What a test says about a signal, a
limit or a file is as true of a fork. Tests of what is imported, or of how an interpreter ends, start a real one.
The server of the workers that a program starts is such a fork as well; see `server_of_workers`.
"""

import contextlib
import os
import signal
import sys
import tempfile
import traceback
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import get_context, get_start_method, set_start_method
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import torch

from equipoise.parallel.workers.main_script import hidden
from equipoise.parallel.workers.preloading import preloading
from tests.support import server_of_workers

__all__ = ["EQUIPOISE", "Program"]

# The source of `python -m equipoise`.
EQUIPOISE = """
import sys
from equipoise.__main__ import main

sys.exit(main())
"""


class Program:
    """A process that runs a script as an interpreter does, in a session of its own.

    Leaving it as a context manager kills what is still alive, and closes the pipes.

    Args:
        source: The script.
        arguments: What follows the name of the script in `sys.argv`.
        path: The file that holds the script, for warnings and tracebacks. Default: none.
        folder: Where it stands. Default: where this process stands.
        environment: Its variables. Default: those of this process.
        shows_warnings: Whether warnings are shown. Default: False.
        starts_workers: Have the server of its workers at hand, a child that waits to be used. Default: False.

    Attributes:
        pid: Its process id, also that of its process group.
        stdin: What it reads.
        stdout: What it writes.
    """

    def __init__(
        self,
        source: str,
        *arguments: str,
        path: Path | None = None,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        shows_warnings: bool = False,
        starts_workers: bool = False,
    ) -> None:
        script = _Script(
            source,
            (str(path or "<script>"), *arguments),
            str(folder or Path.cwd()),
            dict(os.environ if environment is None else environment),
            shows_warnings,
            starts_workers,
            get_start_method(),
        )
        context = get_context("forkserver")
        read_by_it, written_here = context.Pipe(duplex=False)
        read_here, written_by_it = context.Pipe(duplex=False)
        self._complaints = tempfile.TemporaryFile("w+b")  # noqa: SIM115  # a pipe could be full before it is read
        complaints = Connection(os.dup(self._complaints.fileno()), readable=False)
        streams = (read_by_it, written_by_it, complaints)
        self._process = context.Process(target=_run, args=(script, *streams))
        with hidden(), preloading():
            self._process.start()
        for stream in streams:
            stream.close()
        self.pid: int = self._process.pid or 0
        self.stdin = _file_of(written_here, "w")
        self.stdout = _file_of(read_here, "r")

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._process.close()
        for file in (self.stdin, self.stdout, self._complaints):
            file.close()

    @property
    def returncode(self) -> int | None:
        """Its exit code; the number of the signal that killed it, negative; None as long as it is alive."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to the program alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program and all other processes of its group, and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # where it did not get as far as a group of its own
            os.kill(self.pid, signal.SIGKILL)
        self._process.join()

    def finish(self, text: str = "") -> tuple[str, str]:
        """Write the rest of what it reads, and wait for its end.

        Returns:
            The rest of what it has written, and all of what it complained of.
        """
        self.stdin.write(text)
        self.stdin.close()
        written = self.stdout.read()
        self._process.join()
        self._complaints.seek(0)
        return written, self._complaints.read().decode(errors="replace")


def _file_of(pipe: Connection, mode: str) -> IO[str]:
    """A text file on one end of a pipe, line by line, in place of the connection."""
    with pipe:
        return os.fdopen(os.dup(pipe.fileno()), mode, buffering=1)


@dataclass(frozen=True)
class _Script:
    source: str
    argv: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    shows_warnings: bool
    starts_workers: bool
    start_method: str


def _run(script: _Script, *streams: Connection) -> None:
    """Run the script in the process; multiprocessing turns a SystemExit into the exit code."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.chdir(script.folder)
    os.environ.clear()
    os.environ.update(script.environment)
    sys.argv[:] = script.argv
    torch.set_num_threads(1)
    set_start_method(script.start_method, force=True)  # else that of this process
    if script.starts_workers:
        server_of_workers.prepare()
    if not script.shows_warnings:
        warnings.simplefilter("ignore")
    try:
        _execute(script)
    except KeyboardInterrupt:  # after which an interpreter ends itself by the signal
        traceback.print_exc()
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _execute(script: _Script) -> None:
    """Runs the script as the module `__main__`."""
    main = types.ModuleType("__main__")
    if script.argv[0] != "<script>":
        main.__file__ = script.argv[0]
    sys.modules["__main__"] = main
    exec(compile(script.source, script.argv[0], "exec"), vars(main))  # noqa: S102
