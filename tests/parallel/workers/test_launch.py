"""Worker processes: what comes back from them, what they find, which error is told, and that nothing stays."""

import ctypes
import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context, set_forkserver_preload
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from equipoise import ConfigurationError, WorkerError
from equipoise.interop.distributed.processes import preloaded_by_user
from equipoise.parallel.communication.process_group import follows_from_another
from equipoise.parallel.workers.launch import launch
from equipoise.parallel.workers.messages.reports import Report, raise_first_cause
from equipoise.parallel.workers.preloading import preloaded_modules, preloading
from equipoise.parallel.workers.worker_main import call_in_parent
from equipoise.parallel.workers.worker_process import WorkerProcess
from tests.support.surroundings import threads_that_stay

pytestmark = pytest.mark.usefixtures("quick_collections")  # garbage is collected around every test


def number(rank: int) -> int:
    return rank


@pytest.fixture(scope="module")
def servers() -> None:
    """The first launch starts two, which stay."""
    launch(number, 1)


@pytest.fixture(autouse=True)
def nothing_left(servers: None) -> Iterator[None]:
    """No descriptor, thread, process or handler that was not there before; what earlier tests have left may go."""
    gc.collect()
    threads, processes, descriptors, changeable = threading.enumerate(), running(), psutil.Process().num_fds(), state()
    yield
    gc.collect()
    assert not threads_that_stay(threads, daemons=True)
    assert running() <= processes
    assert psutil.Process().num_fds() <= descriptors
    assert state() == changeable


def running() -> set[int]:
    """The ids of this process's children and of their workers."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def state() -> tuple[Any, ...]:
    """Return the state that a launch changes for a moment."""
    main = sys.modules["__main__"]
    return signal.getsignal(signal.SIGTERM), getattr(main, "__file__", None), main.__spec__


# What comes back


def described(rank: int) -> dict[str, Any]:
    return {"rank": rank, "process": os.getpid(), "tensor": torch.full((2,), float(rank))}


def test_the_first_ones_answer_comes_back() -> None:
    answer = launch(described, 3)
    assert answer["rank"] == 0
    assert answer["process"] != os.getpid()
    assert answer["tensor"].tolist() == [0, 0]


def refuse() -> None:
    raise KeyError("no answer")


class StorageError(Exception):
    """Can be pickled, but not be created from its text alone."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")


def refuse_storage() -> None:
    raise StorageError(3, "database is locked")


def only_in(process: int) -> int:
    if os.getpid() != process:
        raise FileNotFoundError("there is no such file in the worker")
    return process


class OnlyInTheParent:
    def __reduce__(self) -> Any:
        return only_in, (os.getpid(),)


def ask(rank: int) -> tuple[list[str], int]:
    errors = []
    for function in (refuse, refuse_storage, threading.Lock, OnlyInTheParent):
        try:
            call_in_parent(function)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors, call_in_parent(os.getpid)


def test_the_parent_answers_questions_and_errors_are_those_of_the_asker() -> None:
    (refused, storage, lock, only_in_parent), answer = launch(ask, 1)
    assert refused == "KeyError: 'no answer'"
    assert storage.startswith("WorkerError: The parent raised ")
    assert storage.endswith("StorageError: 3: database is locked")
    assert lock == "WorkerError: The parent's answer cannot be sent: TypeError: cannot pickle '_thread.lock' object"
    assert only_in_parent == "FileNotFoundError: there is no such file in the worker"
    assert answer == os.getpid()


class Holder:
    def __init__(self, value: Any) -> None:
        self.value, self.lock = value, None


def changed(one: Holder, two: Holder, rank: int) -> dict[str, Any]:
    one.value, own = "changed", Holder(two)
    return {"one": one, "again": [one], "own": own, "value": one.value}


# What they find


def surroundings(rank: int) -> dict[str, Any]:
    return {
        "set": os.environ.get("SET_IN_THE_PARENT"),
        "unset": os.environ.get("HOME"),
        "folder": os.getcwd(),
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "path": list(sys.path),
        "draws": draws(),
        "threads": torch.get_num_threads(),
    }


def draws() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def test_workers_have_the_settings_of_their_parent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those of this moment, not those of the server, which was started before."""
    monkeypatch.delenv("HOME", raising=False)  # the server has it
    monkeypatch.setenv("SET_IN_THE_PARENT", "a b")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    dtype, precision, deterministic = (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.get_deterministic_debug_mode(),
    )
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch.set_deterministic_debug_mode("warn")
        random.seed(1)
        np.random.seed(2)
        torch.manual_seed(3)
        torch.set_num_threads(4)
        found = launch(surroundings, 2)
        expected = surroundings(0)  # drawn after the launch, which has drawn nothing here
    finally:
        torch.set_num_threads(1)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.set_deterministic_debug_mode(deterministic)
    assert found == {**expected, "threads": 2}
    assert (found["set"], found["unset"], found["dtype"]) == ("a b", None, torch.float64)


# Errors


class Mistake(Exception):
    """One that keeps something, and wants something else to be made."""

    def __init__(self, code: int) -> None:
        super().__init__(f"mistake number {code}")
        self.code, self.values = code, torch.arange(3)

    def __reduce__(self) -> Any:
        return Mistake, (self.code,), {"values": self.values, **vars(self)}


class Demanding(Exception):
    """One that cannot be made again from what it keeps."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two} do not fit")


class Locked(Exception):
    """One that cannot be sent."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def fails(failing: int, make: Any, rank: int) -> int:
    if rank == failing:
        error = make()
        error.add_note("A note of its own.")
        try:
            return [][rank]
        except IndexError:
            raise error from None
    return rank


def test_an_error_comes_back_as_what_it_is() -> None:
    with pytest.raises(Mistake, match="mistake number 7") as caught:
        launch(partial(fails, 2, partial(Mistake, 7)), 3)
    error = caught.value
    assert error.code == 7
    assert torch.equal(error.values, torch.arange(3))
    assert error.__notes__ == ["A note of its own.", "Raised in rank 2 of 3."]
    told = str(error.__cause__)
    assert "Traceback" in told
    assert "in fails" in told
    assert "raise error from None" in told
    assert launch(number, 2) == 0


def leaves(how: str, rank: int) -> None:
    if rank == 1 and how == "sys.exit":
        sys.exit("enough")
    if rank == 1:
        os._exit(int(how))


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (partial(fails, 1, Locked), "(?s:.*)in fails(?s:.*)Locked: holds a lock"),
        (partial(fails, 1, partial(Demanding, 1, 2)), "(?s:.*)in fails(?s:.*)Demanding: 1 and 2 do not fit"),
        (partial(leaves, "sys.exit"), r"(?s:.*)sys\.exit\('enough'\)"),
        (partial(leaves, "0"), "(?s:.*)left with exit code 0"),
        (partial(leaves, "255"), r"(?s:.*)code 255\. The server that starts processes may have been ended"),
    ],
    ids=["an error cannot be sent", "an error cannot be made again", "sys.exit", "an exit", "the server's exit code"],
)
def test_a_worker_whose_error_cannot_come_back_is_named(function: Any, told: str) -> None:
    with pytest.raises(WorkerError, match=f"^rank 1 of 2 failed{told}"):
        launch(function, 2)


def unsendable(rank: int) -> Any:
    return {"lock": threading.Lock()}


class Whole:
    """An object whose copy cannot be created."""

    def __reduce__(self) -> Any:
        return Whole, (1,)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (unsendable, "lock cannot be sent"),
        (partial(changed, Holder(threading.Lock()), Holder(1)), "which cannot be sent"),
        (
            partial(changed, Holder(Whole()), Holder(1)),
            "cannot be created there: TypeError: Whole() takes no arguments",
        ),
    ],
    ids=["an answer", "a function", "an object that cannot be created again"],
)
def test_what_cannot_be_sent_is_refused(function: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)) as caught:
        launch(function, 2)
    assert function is not unsendable or "Raised in rank 0 of 2." in caught.value.__notes__


def test_a_worker_that_crashes_shows_its_stack() -> None:
    def computes(rank: int) -> None:
        # A second thread shows that the stacks of all are written.
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        ctypes.string_at(0)

    with pytest.raises(WorkerError, match=r"^rank 0 of 1 was killed by SIGSEGV\.") as caught:
        launch(computes, 1)
    message = str(caught.value)
    assert " It was here:\n\nFatal Python error: " in message
    assert "in computes" in message
    assert message.count("\nThread 0x") + message.count("\nCurrent thread 0x") >= 2
    assert "_end_with_parent" not in message
    # Nothing says that it exchanged tensors.
    assert "different shapes" not in message


def test_a_worker_that_aborts_in_an_exchange_may_have_exchanged_other_shapes() -> None:
    stack = 'Current thread 0x1:\n  File "torch/distributed/distributed_c10d.py", line 1 in all_reduce\n'
    report = Report(0, 0.0, text=stack, signal=signal.SIGABRT)
    with pytest.raises(WorkerError, match=r"may have exchanged tensors of different shapes\. It was here:"):
        raise_first_cause(1, [report], [])


def follows_and_then_fails(fifo: str, rank: int) -> None:
    """Rank 0 ends with what follows from rank 1, which raises its error when rank 0 is gone."""
    if rank == 0:
        os.open(fifo, os.O_WRONLY)
        raise RuntimeError("Connection closed by peer")
    with open(fifo, "rb") as ended:
        ended.read()
    raise RuntimeError("a mistake")


def test_a_cause_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may report the cause last."""
    monkeypatch.setattr("equipoise.parallel.workers.launch._GATHERING", 0.0)
    monkeypatch.setattr("equipoise.parallel.workers.launch._UNTIL_CAUSE", 120.0)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RuntimeError, match="a mistake"):
        launch(partial(follows_and_then_fails, str(tmp_path / "fifo")), 2, is_consequence=follows_from_another)


def follows_or_hangs(rank: int) -> None:
    if rank == 0:
        raise RuntimeError("Connection closed by peer")
    threading.Event().wait()


def test_a_process_that_hangs_is_named_soon_after_a_short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this bound it is named in ten days."""
    monkeypatch.setattr("equipoise.parallel.workers.launch._UNTIL_CAUSE", 1e6)
    with pytest.raises(WorkerError, match=r"rank 1 of 2 hung(?s:.*)in follows_or_hangs"):
        launch(follows_or_hangs, 2, is_consequence=follows_from_another, timeout=1.0)


def gives_up(rank: int) -> None:
    raise RuntimeError("Timed out waiting 1000ms for recv" if rank == 1 else "Connection closed by peer")


def test_processes_that_wait_for_one_another_are_named_whoever_gives_up_first() -> None:
    with pytest.raises(WorkerError, match=r"^All 2 processes waited for others(?s:.*)rank 0:(?s:.*)rank 1:"):
        launch(gives_up, 2, is_consequence=follows_from_another)


def raised_by_a_signal(*_: Any) -> None:
    raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")


def a_child_ends(error: BaseException) -> bool:
    """Ends a child process, whose signal is answered at once."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return False


def fails_while_a_child_ends(rank: int) -> None:
    turn_off = signal.signal

    def once_too_late(number: int, handler: Any) -> Any:
        """The first attempt to turn the signal off comes too late."""
        signal.signal = turn_off

    signal.signal(signal.SIGCHLD, raised_by_a_signal)
    signal.signal = once_too_late
    raise Mistake(3)


def test_a_report_that_is_broken_off_is_made_again() -> None:
    with pytest.raises(Mistake, match="mistake number 3"):
        launch(fails_while_a_child_ends, 1, is_consequence=a_child_ends)


# Signals


def waits_for_a_signal(folder: Path, rank: int) -> bool:
    received = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: received.set())
    (folder / str(rank)).write_bytes(b"ready")
    return received.wait(120)


def test_a_sigterm_reaches_workers_that_start_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker runs already, the second does not yet."""
    start = WorkerProcess.start
    for rank in range(2):
        os.mkfifo(tmp_path / str(rank))

    def start_and_wait(context: Any, rank: int, task: Any) -> WorkerProcess:
        worker = start(context, rank, task)
        assert (tmp_path / str(rank)).read_bytes() == b"ready"
        if rank == 0:
            signal.raise_signal(signal.SIGTERM)
        return worker

    monkeypatch.setattr(WorkerProcess, "start", start_and_wait)
    received: list[int] = []
    earlier = signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    try:
        assert launch(partial(waits_for_a_signal, tmp_path), 2)
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert received == [signal.SIGTERM]


def says_later_that_it_is_alive(sender: Connection) -> None:
    threading.Event().wait(60)
    sender.send(None)


def test_a_worker_that_leads_no_group_yet_is_killed() -> None:
    context = get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=says_later_that_it_is_alive, args=(sender,))
    process.start()
    sender.close()
    WorkerProcess(0, process, *context.Pipe()).end()
    with receiver, pytest.raises(EOFError):
        receiver.recv()


# Where it is called


def test_two_launches_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", main.__spec__)  # which each of them hides for a moment
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(partial(launch, described), [2, 2]))
    assert answers[0]["process"] != answers[1]["process"]


def test_a_server_imports_what_the_user_preloads_after_our_modules() -> None:
    """But no script once more. The list of the user stays."""
    before = preloaded_by_user()
    set_forkserver_preload(["__main__", "pyclbr", "torch"])
    try:
        with preloading():
            *modules, end = preloaded_by_user()
        assert modules == [*preloaded_modules(), "pyclbr"]
        assert end not in modules
        assert preloaded_by_user() == ["__main__", "pyclbr", "torch"]
    finally:
        set_forkserver_preload(before)


SCRIPT = """
import gc, json, os, sys
os.write(1, b"the script runs\\n")
import torch
from multiprocessing import forkserver, set_forkserver_preload
from equipoise import DDPStrategy, PipelineStrategy, Trainer
from equipoise.parallel.workers.launch import launch
from equipoise.parallel.workers.messages.reports import Report, raise_first_cause
from equipoise.parallel.workers.preloading import preload

preload("tabnanny", "a_module_that_is_not_there")
set_forkserver_preload(["__main__", "pyclbr", "torch"])
assert not {"tabnanny", "pyclbr"} & set(sys.modules)

class Thing:
    def __init__(self, value):
        self.value = value

class Mistake(Exception):
    pass

def work(rank):
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000  # what the server has imported
    os.write(1, f"rank {rank} runs\\n".encode())
    if rank == 1 and FAILS:
        raise Mistake("on purpose")
    return Thing(OFFSET + rank)

OFFSET, FAILS, parent = 40, False, os.getpid()
before = (sys.modules["__main__"].__spec__, __file__)
answer = launch(work, 2)
assert type(answer) is Thing and answer.value == 40
OFFSET = 50
assert launch(work, 2).value == 50
FAILS = True
try:
    launch(work, 2)
except Mistake as error:
    assert error.__notes__ == ["Raised in rank 1 of 2."]
else:
    raise AssertionError
assert (sys.modules["__main__"].__spec__, __file__) == before
modules, frozen = launch(lambda rank: (list(sys.modules), gc.get_freeze_count()), 1)
assert frozen > 10_000
assert forkserver._forkserver._preload_modules == ["__main__", "pyclbr", "torch"]
print(json.dumps(modules))
print("the script ends")
"""


@pytest.mark.slow
def test_a_script_runs_once_and_its_workers_find_what_was_registered(tmp_path: Path) -> None:
    """Without a guard around what it does; what it defines goes to the workers and comes back.

    The trainer and its strategies register themselves for the server. Modules that the user gave multiprocessing are
    there as well; what cannot be imported is passed over.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment, command = {**os.environ, "PYTHONPATH": path}, [sys.executable, "-m", "script"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    first, *others, found, last = done.stdout.splitlines()
    assert (first, last) == ("the script runs", "the script ends")
    assert sorted(others) == ["rank 0 runs"] * 3 + ["rank 1 runs"] * 3
    modules = json.loads(found)
    assert {"tabnanny", "pyclbr", "lightning.pytorch", "torchmetrics.classification"} <= set(modules)
    strategies = {"equipoise.strategies.ddp.strategy", "equipoise.extensions.pipeline.strategy.strategy"}
    assert {"equipoise.trainer.trainer", *strategies} <= set(modules)
    assert "equipoise.app" not in modules
