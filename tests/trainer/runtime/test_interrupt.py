"""Ctrl-C and SIGTERM end a run promptly, and leave nothing behind."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from lightning.pytorch.utilities.exceptions import SIGTERMException

from tests.support.programs import Program
from tests.support.trainer_runs import Validated, loader, trainer

PATIENCE = 300.0  # seconds for what ends after the program

# In a process of its own: it says "ready" where it is to be interrupted, and continues when it reads a line.
SCRIPT = """
import json, multiprocessing, os, select, signal, sys, threading
import lightning as L
import psutil
from tests.support.trainer_runs import Validated, loader, trainer

where, slow_release = sys.argv[1], "slow" in sys.argv

def wait(word):
    print(word, *(child.pid for child in psutil.Process().children()), flush=True)
    # Python handles a signal that comes just before a blocking read only when the read ends.
    while not select.select([sys.stdin], [], [], 1.0)[0]:
        pass
    sys.stdin.readline()

class Module(Validated):
    def training_step(self, batch, batch_idx):
        if where == "train" and batch_idx == 1 and self.current_epoch == 0:
            wait("ready")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if where == "validation" and batch_idx == 1:
            wait("ready")
        return super().validation_step(batch, batch_idx)

class Callback(L.Callback):
    def __init__(self):
        self.errors = []

    def on_exception(self, trainer, module, exception):
        self.errors.append(type(exception).__name__)
        if slow_release:
            wait("releasing")
        self.errors.append("released")

module, callback = Module(), Callback()
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
run = trainer(callbacks=[callback], num_sanity_val_steps=0, max_epochs=2)
data = loader(4, num_workers=1, persistent_workers=where == "validation"), loader(4, num_workers=1)
try:
    run.fit(module, *data)
except BaseException as error:
    for thread in set(threading.enumerate()) - {threading.main_thread()}:
        thread.join(60.0)  # a queue's thread that was told to end, and is about to
    report = {
        "error": type(error).__name__,
        "errors": callback.errors,
        "steps": list(module.ran),
        "interrupted": run.interrupted,
        "modes": all(part.training for part in module.modules()),
        "children": [child.pid for child in psutil.Process().children()],
        "threads": [thread.name for thread in threading.enumerate()],
        "handlers": handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    }
    where = "nowhere"
    again = trainer(max_epochs=1)
    again.fit(module, *data)
    report |= {"again": again.global_step, "left": [child.pid for child in psutil.Process().children()]}
    print(json.dumps(report), flush=True)
    raise
"""


class Interrupted:
    """A process that runs the script; entered when it is ready."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.workers: list[psutil.Process] = []

    def expect(self, word: str) -> None:
        """Waits until the script says a word; it tells its worker processes, too."""
        said, *pids = self.program.stdout.readline().split() or ["nothing"]
        if said != word:
            raise AssertionError(f"{said} instead of {word}: {self.program.finish()[1]}")
        self.workers += [psutil.Process(int(pid)) for pid in pids]

    def signal_all(self, number: int) -> None:
        """Send a signal as a terminal does: every process of the group receives it."""
        os.killpg(self.program.pid, number)

    def finish(self) -> dict[str, Any]:
        """Lets the script continue, and returns what it reports when it has ended."""
        out, err = self.program.finish("\n\n")
        assert out, err
        report: dict[str, Any] = json.loads(out.splitlines()[-1])
        return {**report, "status": self.program.returncode, "stderr": err}


@contextmanager
def running(*arguments: str) -> Iterator[Interrupted]:
    with Program(SCRIPT, *arguments) as program:
        run = Interrupted(program)
        run.expect("ready")
        yield run
    _, alive = psutil.wait_procs(run.workers, timeout=PATIENCE)
    assert run.workers
    assert not alive


def check(report: dict[str, Any], error: str) -> None:
    """Checks that the run ended with an error that one callback heard of once, and that nothing was left."""
    assert report["error"] == error, report["stderr"]
    assert report["errors"] == [error, "released"]
    assert report["interrupted"]
    assert report["modes"]
    assert report["children"] == []
    assert report["threads"] == ["MainThread"]
    assert report["handlers"]
    assert report["again"] == 4
    assert report["left"] == []


@pytest.mark.parametrize("where", ["train", "validation"])
def test_ctrl_c_releases_resources_and_raises_keyboard_interrupt(where: str) -> None:
    with running(where) as run:
        run.signal_all(signal.SIGINT)
        report = run.finish()
    check(report, "KeyboardInterrupt")
    assert report["status"] == -signal.SIGINT
    assert "\nKeyboardInterrupt\nThere is no checkpoint of this fit. Lost: " in report["stderr"]
    assert report["steps"] == {"train": ["training"], "validation": ["training"] * 4 + ["validation"]}[where]


def test_an_impatient_user_does_not_disturb_the_release() -> None:
    with running("train", "slow") as run:
        run.signal_all(signal.SIGINT)
        run.expect("releasing")
        run.signal_all(signal.SIGINT)
        run.signal_all(signal.SIGINT)
        report = run.finish()
    check(report, "KeyboardInterrupt")
    assert report["status"] == -signal.SIGINT


def test_sigterm_ends_after_the_batch() -> None:
    """As under Lightning: the run ends by SystemExit, so that schedulers of clusters see it end of its own accord."""
    with running("train") as run:
        run.program.send_signal(signal.SIGTERM)
        report = run.finish()
    check(report, "SIGTERMException")
    assert report["status"] == 0
    assert report["steps"] == ["training"] * 2


# In this process, where one can look closer


class Raising(Validated):
    """Sends this process a signal in a step of the first epoch."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__()
        self.step, self.number = step, number

    def loss(self, batch: Any) -> Any:
        """Every step computes it; the second call in a row of that step sends the signal."""
        if self.ran[-2:] == [self.step] * 2:
            self.step = "none"
            signal.raise_signal(self.number)
        return super().loss(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().predict_step(batch, batch_idx)
        self.loss(batch)
        return output


RUNS: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "training": (lambda run, module: run.fit(module, loader(), loader()), ["training"] * 2),
    "validation": (lambda run, module: run.fit(module, loader(), loader()), ["training"] * 3 + ["validation"] * 2),
    "test": (lambda run, module: run.test(module, loader()), ["test"] * 2),
    "predict": (lambda run, module: run.predict(module, loader()), ["predict"] * 2),
}


@pytest.mark.parametrize("step", RUNS)
@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SIGTERMException)])
def test_the_run_ends_after_the_batch_at_the_latest(step: str, number: int, error: type[BaseException]) -> None:
    call, ran = RUNS[step]
    run, module = trainer(num_sanity_val_steps=0, max_epochs=2), Raising(step, number)
    with pytest.raises(error):
        call(run, module)
    assert module.ran == ran
    assert run.interrupted
    assert run.received_sigterm == (number == signal.SIGTERM)
    assert all(part.training for part in module.modules())
    call(run, module)  # the same trainer continues
    assert not run.interrupted
    assert not run.received_sigterm


def test_sigterm_at_the_last_batch_of_training_ends_after_the_epoch() -> None:
    class Last(Raising):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                signal.raise_signal(signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    module = Last("none", 0)
    run = trainer(limit_val_batches=0, max_epochs=2)
    with pytest.raises(SIGTERMException):
        run.fit(module, loader())
    assert run.current_epoch == 1
    assert module.ran == ["training"] * 3


def test_a_handler_of_the_users_own_is_called_and_kept() -> None:
    received = []

    def handler(number: int, frame: Any) -> None:
        received.append(number)

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(SIGTERMException):
            trainer().fit(Raising("training", signal.SIGTERM), loader(), loader())
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
