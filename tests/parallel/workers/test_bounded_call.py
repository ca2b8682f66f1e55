"""A function in a process of its own: how its end is reported, and that nothing of it stays."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from equipoise.errors import ConfigurationError
from equipoise.parallel.workers import bounded_call
from equipoise.parallel.workers.bounded_call import CallError, call_bounded
from tests.support.programs import Program


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (sys.exit, (0,), "its process left no result"),
        (sys.exit, (3,), "its process ended with exit code 3"),
        (sys.exit, (255,), "its process ended, or the server that starts processes was ended"),
        (kill_itself, (), "its process was ended by SIGKILL, as when the memory of the host is exhausted"),
    ],
    ids=["leaves in silence", "leaves", "leaves as with the server", "is killed"],
)
def test_how_a_process_ended_is_told(function: Any, arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(CallError) as caught:
        call_bounded(function, *arguments, timeout=600)
    assert str(caught.value) == reason
    assert not caught.value.is_raised


def tell(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr)


def test_progress_is_printed_here(capfd: pytest.CaptureFixture[str]) -> None:
    call_bounded(tell, "note: one", "other", "note: two", timeout=60, progress="note: ")
    assert capfd.readouterr().err == "note: one\nnote: two\n"
    call_bounded(tell, "note: one", timeout=60)
    assert not capfd.readouterr().err


def raise_an_error(kind: type[Exception]) -> None:
    print("before")
    raise kind("the reason\nand more")


def shout(error: Exception) -> str:
    return str(error).upper()


def test_an_error_in_the_process_is_told() -> None:
    with pytest.raises(CallError) as caught:
        call_bounded(raise_an_error, ValueError, timeout=60)
    assert str(caught.value) == "ValueError: the reason"
    assert (caught.value.is_raised, caught.value.is_wrong_input) == (True, False)
    lines = caught.value.output.splitlines()
    assert (lines[0], lines[-2], lines[-1]) == ("before", "ValueError: the reason", "and more")
    with pytest.raises(CallError, match="THE REASON") as caught:
        call_bounded(raise_an_error, ConfigurationError, timeout=60, explain=shout)
    assert caught.value.is_wrong_input


def read_surroundings() -> tuple[Any, ...]:
    import module_of_a_user
    import module_of_the_folder

    is_leader = os.getsid(0) == os.getpid()
    return module_of_a_user.VALUE, os.environ["CHOSEN"], Path.cwd(), module_of_the_folder.__file__, is_leader


def test_a_process_finds_what_its_parent_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server that forks it started with the variables and in the folder of an earlier time.

    A notebook imports from the folder in which it stands, also if it has changed it.
    """
    folder, file = tmp_path / "modules", tmp_path / "module_of_the_folder.py"
    folder.mkdir()
    file.touch()
    (folder / "module_of_a_user.py").write_text("VALUE = 7\n")
    monkeypatch.setenv("CHOSEN", "now")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    expected = (7, "now", tmp_path, str(file), True)
    assert call_bounded(read_surroundings, timeout=60, paths=[str(folder)]) == expected
    assert os.listdir(folder) == ["module_of_a_user.py"]


def choose_a_start_method() -> None:
    assert sys.stdin.read() == ""
    assert os.read(0, 1) == b""
    assert multiprocessing.get_start_method(allow_none=True) is None
    multiprocessing.set_start_method("spawn")


def test_both_processes_may_choose_how_others_start() -> None:
    chosen = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    try:
        call_bounded(choose_a_start_method, timeout=60)
        assert multiprocessing.get_start_method(allow_none=True) is None
    finally:
        multiprocessing.set_start_method(chosen, force=True)


def test_a_process_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(process: Any) -> None:
        raise BrokenPipeError("the server has ended")

    monkeypatch.setattr(bounded_call, "_start", refuse)
    with pytest.raises(CallError, match="its process could not be started: BrokenPipeError: the server has ended"):
        call_bounded(len, "abc", timeout=60)


def start_a_child_and_wait(pipe: str) -> None:
    """Start a process that writes into the same pipe as long as it lives."""
    with open(pipe, "w") as file:
        subprocess.Popen(["tail", "-f", "/dev/null"], stdout=file)
        file.write("begun\n")
    threading.Event().wait()


def test_a_bound_ends_the_process_and_its_children(tmp_path: Path) -> None:
    """The pipe ends once both have ended."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    # A pipe that nothing else opens for writing would be waited for without end.
    kept = os.open(pipe, os.O_WRONLY)
    with pytest.raises(CallError) as caught:
        call_bounded(start_a_child_and_wait, str(pipe), timeout=0.5, option=" (--bound)")
    os.close(kept)
    reader.join(60)
    assert str(caught.value) == "it took longer than 0.5 s (--bound)"
    assert not reader.is_alive()


def wait_and_say_so(pipe: str) -> None:
    """Hold a pipe open as long as this process lives."""
    with open(pipe, "w") as file:
        file.write(f"{os.getpid()}\n")
        file.flush()
        threading.Event().wait()


CALLS = """
import sys
from equipoise.parallel.workers.bounded_call import call_bounded
from tests.parallel.workers.test_bounded_call import wait_and_say_so

call_bounded(wait_and_say_so, sys.argv[1], timeout=600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_process_ends_with_its_parent(number: int, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with Program(CALLS, str(pipe), starts_workers=True) as program, pipe.open() as file:
        assert int(file.readline()) != program.pid
        program.send_signal(number)
        # The end of the pipe is that of the process.
        assert file.read() == ""


def call_from_a_daemon(reason: Any) -> None:
    try:
        call_bounded(len, "abc", timeout=60)
    except CallError as error:
        reason.put(str(error))


def test_a_daemon_says_that_it_cannot() -> None:
    context = get_context("fork")
    reasons = context.SimpleQueue()
    daemon = context.Process(target=call_from_a_daemon, args=(reasons,), daemon=True)
    daemon.start()
    assert "daemon of multiprocessing" in reasons.get()
    daemon.join()
    daemon.close()
    reasons.close()
