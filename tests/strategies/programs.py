"""Scripts as programs whose imports are done: processes of multiprocessing's server run them, alone or under torchrun.

A program started in the ordinary way imports torch and Lightning anew, which takes longer than all that it does.
"""

import os
import runpy
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch.distributed.run as torch_run

from equipoise.parallel.workers.preloading import preloading

__all__ = ["start_script", "torchrun", "wait_for"]

# Variables that Lightning's `seed_everything` sets. The server of processes may have started while another test had set
# them, and its processes would still have them.
SEEDS = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")


def start_script(script: Path, arguments: Sequence[str] = (), **variables: str) -> BaseProcess:
    """Start a script as `__main__` in a process of its own.

    Args:
        script: The file.
        arguments: What the script finds in `sys.argv` after its name.
        variables: Variables of its environment, beside those that the server was started with.
    """
    with preloading():
        process = get_context("forkserver").Process(
            target=_run, args=(str(script), list(arguments), {**_seeds(), **variables})
        )
        process.start()
    return process


def _seeds() -> dict[str, str]:
    """Return the variables of seeds that are set in this process."""
    return {name: os.environ[name] for name in SEEDS if name in os.environ}


def _run(script: str, arguments: list[str], variables: dict[str, str]) -> None:
    for name in SEEDS:
        os.environ.pop(name, None)
    os.environ.update(variables)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def wait_for(processes: Sequence[BaseProcess]) -> None:
    """Wait for scripts, all of which are to end in order."""
    try:
        for process in processes:
            process.join(600)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()  # without effect on one that has ended
            process.join()
            process.close()


def torchrun(
    monkeypatch: pytest.MonkeyPatch, script: Path, arguments: Sequence[str], *calls: Sequence[str]
) -> list[BaseException]:
    """Call torchrun once or several times at once, each time with the same script, and return what the calls raised.

    Args:
        monkeypatch: Takes back what torchrun changes in the environment.
        script: The file that its processes run as `__main__`.
        arguments: What the script finds in `sys.argv` after its name.
        calls: The options of each call.
    """
    for name, value in (("OMP_NUM_THREADS", "1"), ("TORCHELASTIC_SIGNALS_TO_HANDLE", "")):
        monkeypatch.setenv(name, value)
    how = ["--run-path", "--start-method", "forkserver", "--log-dir", str(script.parent / "logs")]
    # torchrun passes variables of its own only.
    program = script.with_name(f"{script.stem}_with_seeds.py")
    call_of_run = f"_run({str(script)!r}, {list(arguments)!r}, {_seeds()!r})"
    program.write_text(f"from tests.strategies.programs import _run\n{call_of_run}\n")
    with preloading():
        forkserver.ensure_running()
    errors: list[BaseException] = []

    def call(options: Sequence[str]) -> None:
        try:
            torch_run.main([*options, *how, str(program)])
        except BaseException as error:
            errors.append(error)

    # Outside of the main thread it leaves the handlers of signals alone.
    threads = [threading.Thread(target=call, args=(options,)) for options in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
