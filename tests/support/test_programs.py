"""A program that is forked does what one does that an interpreter runs."""

import os
import signal
from multiprocessing import get_start_method
from pathlib import Path

import psutil
import pytest

from tests.support.programs import Program


def test_what_it_is_given_and_what_it_says(tmp_path: Path) -> None:
    script = """
import multiprocessing, os, sys, warnings
print(multiprocessing.get_start_method())
class Own: ...
print(__name__, Own.__module__, sys.argv[1:], os.getcwd(), dict(os.environ), flush=True)
print(sys.stdin.readline().upper(), sys.stdin.read())
warnings.warn("nobody sees this")
print("complaint" * 20_000, file=sys.stderr)
sys.exit(7)
"""
    with Program(script, "a", "b c", folder=tmp_path, environment={"ONLY": "this"}) as program:
        first = f"{get_start_method()}\n__main__ __main__ ['a', 'b c'] {tmp_path} {{'ONLY': 'this'}}\n"
        assert program.stdout.readline() + program.stdout.readline() == first
        assert program.returncode is None
        assert program.finish("one\ntwo") == ("ONE\n two\n", "complaint" * 20_000 + "\n")
        assert program.returncode == 7


def test_an_error_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text("import warnings\nwarnings.warn('here')\n1 / 0  # there\n")
    with Program(path.read_text(), path=path, shows_warnings=True) as program:
        _, complaints = program.finish()
        assert program.returncode == 1
    assert f"{path}:2: UserWarning: here" in complaints
    assert "1 / 0  # there" in complaints
    assert complaints.splitlines()[-1] == "ZeroDivisionError: division by zero"


@pytest.mark.thorough
def test_it_is_killed_with_what_it_has_started() -> None:
    script = "import subprocess, sys\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\nsys.stdin.read()\n"
    with Program(script) as program:
        child = psutil.Process(int(program.stdout.readline()))
        assert child.ppid() == program.pid == os.getpgid(child.pid)
    assert child.wait(timeout=60) is None
    assert not psutil.pid_exists(program.pid)


def test_an_interrupt_ends_it_as_an_interpreter() -> None:
    with Program("import sys\nprint('ready', flush=True)\nsys.stdin.read()\n") as program:
        assert program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGINT)
        _, complaints = program.finish()
        assert program.returncode == -signal.SIGINT
    assert complaints.endswith("\nKeyboardInterrupt\n")


READY = """
import sys

print("ready", flush=True)
sys.stdin.readline()
"""

WITH_WORKERS = """
import multiprocessing, os

os.environ["SET_BY_THE_SCRIPT"] = "value"
context = multiprocessing.get_context("forkserver")
workers = [context.Process(target=target, args=arguments) for target, arguments in (
    (os.system, ("echo $SET_BY_THE_SCRIPT $PPID",)), (os.abort, ()),
)]
for worker in workers:
    worker.start()
    worker.join()
print([worker.exitcode for worker in workers], "lightning" in sys.modules)
"""


@pytest.mark.thorough
def test_workers_are_forked_by_a_child_of_the_program() -> None:
    """They write where the program writes, and find the variables that the script has set."""
    with Program(READY + WITH_WORKERS, starts_workers=True) as program:
        assert program.stdout.readline() == "ready\n"
        (server,) = psutil.Process(program.pid).children()
        written, complaints = program.finish("go\n")
        assert program.returncode == 0, complaints
        assert server.wait(timeout=60) is None
    value, parent, rest = written.split(maxsplit=2)
    assert value == "value"
    assert int(parent) not in (program.pid, server.pid)
    assert rest == f"[0, {-signal.SIGABRT}] True\n"


@pytest.mark.thorough
def test_a_server_that_is_not_used_ends_with_the_program() -> None:
    with Program(READY, starts_workers=True) as program:
        assert program.stdout.readline() == "ready\n"
        (server,) = psutil.Process(program.pid).children()
        program.finish("go\n")
        assert program.returncode == 0
    assert server.wait(timeout=60) is None
