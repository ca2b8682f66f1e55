"""Rules for every test: random numbers and hypotheses that can be repeated, one thread, and nothing left behind.

The guard below is there for every test: after it, and after all its fixtures, the process is as it was before.
"""

import contextlib
import gc
import importlib.util
import logging
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import lightning_utilities.core.rank_zero as rank_zero_module
import numpy
import psutil
import pytest
import rich
import torch
import tqdm
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from equipoise.interop.versions import warn_of_untested_versions
from equipoise.parallel.workers.preloading import preload
from tests.simulated.devices.installation import is_installed
from tests.support.quick_cases import mark_further_cases

__all__ = ["LIGHTNINGS_OWN_WARNINGS", "Surroundings", "ignoring", "threads_that_stay"]

# A machine without Hydra can run all other tests.
_NEED_HYDRA = [
    "app",
    "extensions/pool",
    "extensions/ray/test_ray_launcher.py",
    "extensions/comparison",
    "extensions/planning/command",
    "docs",
    "examples",
    "trainer/checkpointing/test_objects.py",
]
collect_ignore = [] if importlib.util.find_spec("hydra") else _NEED_HYDRA

# The console of rich keeps what the environment says when it is made, which a test may have changed for itself.
rich.get_console()
torch.set_num_threads(1)  # small tensors: more threads would only wait for each other, and results would depend on them

# Versions that nobody has tried are what a test of them is about. The one warning about them would fail any test.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    warn_of_untested_versions()

# Worker processes


def pytest_collection_finish(session: pytest.Session) -> None:
    """Lets workers find the test modules imported, as they find the trainer; without a GPU, which must not be asked."""
    addresses = [item.nodeid for item in session.items if " at 0x" in item.nodeid]
    if addresses:  # which differ from process to process, so pytest-xdist would run nothing
        raise pytest.UsageError(f"Names of tests hold addresses of objects: {addresses[0]}. Give the parameters `ids`.")
    modules = {item.module.__name__ for item in session.items if isinstance(item, pytest.Function)}
    set_aside_what_is_imported()
    if not torch.cuda.is_available():
        preload("equipoise.trainer.trainer", *sorted(name for name in modules if name.startswith("tests.")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_further_cases(items)
    for item in items:
        if not _HAS_EXTENSIONS and item.get_closest_marker("whole_package") is not None:
            item.add_marker(pytest.mark.skip(reason="it is about the whole package, of which extensions are missing"))


# A copy of the package without extensions: `python -m tests.core_alone`

_HAS_EXTENSIONS = importlib.util.find_spec("equipoise.extensions") is not None
_MISSING = (
    "missing from this installation",
    "No module named 'equipoise.extensions",
    "No module named 'tests.extensions",
)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Skips modules that import an extension, where none is there."""
    report: Any = yield
    if report.failed and _lacks_extension(report):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, "Skipped: it imports an extension, which is missing")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Skips tests that ask for an extension, where none is there."""
    report: Any = yield
    if report.failed and _lacks_extension(report):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), 0, "Skipped: it asks for an extension, which is missing")
    return report


def _lacks_extension(report: Any) -> bool:
    text = str(report.longrepr)
    return not _HAS_EXTENSIONS and any(part in text for part in _MISSING)


# Chance


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seeds all generators, so that what a test draws does not depend on the tests before it."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # Without devices it would note the call for each kind of device, with a trace of the stack: a fifth of the time
        # of a short test.
        torch.default_generator.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


hypothesis.settings.register_profile(
    "equipoise",
    deadline=None,
    print_blob=True,
    derandomize=False,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # a matter of the machine
)
# Seeds differ from run to run, so that examples add up.
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("equipoise"), max_examples=25)
hypothesis.settings.load_profile("equipoise")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Chooses the seed here rather than in each test, so that it can be named and given again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job; programs in tests inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if torch.cuda.is_available() and not _is_about_gpus(config):
        # By default a Trainer takes GPUs where there are any, and these tests say what it does on a CPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # `make test`, but not where every combination is asked for.
    if config.option.markexpr == "not slow" and os.environ.get("EQUIPOISE_TEST_ALL") != "1":
        hypothesis.settings.load_profile("quick")
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))


def _is_about_gpus(config: pytest.Config) -> bool:
    """Tell whether GPUs are wanted: they are simulated, or `tests/gpu` is all that runs."""
    folder = Path(__file__).with_name("gpu")
    paths = [Path(config.invocation_params.dir, argument.partition("::")[0]).resolve() for argument in config.args]
    return is_installed() or all(path.is_relative_to(folder) for path in paths)


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.getoption("--hypothesis-seed")
    return f"hypotheses are drawn with --hypothesis-seed={seed}"


# Warnings are errors. These are none that a user could heed.

LIGHTNINGS_OWN_WARNINGS = (
    r".*isinstance\(treespec, LeafSpec\)",  # lightning.pytorch's CombinedLoader with a new torch
    r"The '\w+' does not have many workers",  # Lightning's advice for its own runs beside ours
    r"You're resuming from a checkpoint that ended before the epoch ended",
    r"It is recommended to use `self.log.*sync_dist=True",
)


def ignoring(*messages: str) -> list[pytest.MarkDecorator]:
    """Marks for `pytestmark`: Lightning's own warnings are passed over, and those that begin as the messages do.

    Args:
        messages: Regular expressions.
    """
    return [pytest.mark.filterwarnings(f"ignore:{message}") for message in (*LIGHTNINGS_OWN_WARNINGS, *messages)]


# Nothing is left behind.

_PYTESTS_OWN = "PYTEST_CURRENT_TEST"  # changes between the phases of a test
# By whichever test comes first.
_SET_BY_IMPORTS = ("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
# Servers of multiprocessing, whose children are examined before, and torch's compilers of kernels for a GPU.
_ENDING_WITH_US = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "_inductor/compile_worker")
_LIGHTNINGS_OWN = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "MASTER_PORT")  # set and never taken back; done here instead
_PROC = Path("/proc")
_HANDLED = (signal.SIGINT, signal.SIGTERM)
_LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning", "equipoise")
_PATIENCE = 60.0  # seconds for what was told to end and is about to; passed in full only by what never ends

# A bar of tqdm starts a thread that stays as long as the process, even a bar that is not shown (`fx.Interpreter`).
tqdm.tqdm.monitor_interval = 0


class Surroundings:
    """State of the process that a test may change in the course of its work, but not for others."""

    def __init__(self) -> None:
        self.threads = set(threading.enumerate())
        self.children = _children()
        self.environment = dict(os.environ)
        self.handlers = {number: signal.getsignal(number) for number in _HANDLED}
        self.torch = _torch_modes()
        self.watches = len(_get_current_dispatch_mode_stack())
        self.levels = _levels()
        self.messages = rank_zero_module.log.name
        self.rank = getattr(rank_zero_only, "rank", 0)
        self.folder = os.getcwd()
        self.console = vars(rich.get_console())

    def complaints(self) -> Iterator[str]:
        """Yield a sentence for everything that is not as it was."""
        if alive := self._threads_left():
            yield f"threads are alive: {alive}"
        if alive := self._children_left():
            yield f"child processes are alive: {alive}"
        if changed := _differing(
            self.environment, dict(os.environ), {_PYTESTS_OWN, *_SET_BY_IMPORTS, *_LIGHTNINGS_OWN}
        ):
            yield f"environment variables have changed: {changed}"
        if changed := _differing(self.handlers, {number: signal.getsignal(number) for number in _HANDLED}):
            yield f"signal handlers have changed: {changed}"
        if changed := _differing(self.torch, _torch_modes()):
            yield f"torch has changed: {changed}"
        if (watches := len(_get_current_dispatch_mode_stack())) != self.watches:
            yield f"{watches - self.watches} watches of operations have not been stopped"
        if changed := _differing(self.levels, _levels()):
            yield f"levels of loggers have changed: {changed}"
        if (name := rank_zero_module.log.name) != self.messages:
            yield f"Lightning's messages go to the logger {name} instead of {self.messages}"
        if (rank := getattr(rank_zero_only, "rank", 0)) != self.rank:  # all but the first say and log nothing
            yield f"Lightning's rank has changed: {rank} instead of {self.rank}"
        if (folder := _folder()) != self.folder:
            yield f"the current directory has changed: {folder} instead of {self.folder}"

    def _threads_left(self) -> list[str]:
        return [thread.name for thread in threads_that_stay(self.threads)]

    def _children_left(self) -> list[str]:
        if started := _processes(pid for server in _servers() for pid in _children(server.pid)):
            _, alive = psutil.wait_procs(started, timeout=_PATIENCE)
            if alive:
                return [f"{' '.join(process.cmdline())} ({process.pid}) of a server of processes" for process in alive]
        if not _children() - self.children:
            return []
        gc.collect()  # whoever holds them may only wait to be collected
        started = [child for child in psutil.Process().children() if child.pid not in self.children]
        _, alive = psutil.wait_procs([child for child in started if not _ends_with_us(child)], timeout=_PATIENCE)
        return [" ".join(child.cmdline()) for child in alive if child.is_running()]

    def restore(self) -> None:
        """Keeps one culprit from spoiling all tests after it."""
        self.restore_environment()
        for number, handler in self.handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        _set_torch_modes(self.torch)
        while len(_get_current_dispatch_mode_stack()) > self.watches:
            _pop_mode()
        for name, level in self.levels.items():
            logging.getLogger(name).setLevel(level)
        rank_zero_module.log = logging.getLogger(self.messages)
        vars(rank_zero_only)["rank"] = self.rank
        os.chdir(self.folder)

    def restore_environment(self) -> None:
        for name in _differing(self.environment, dict(os.environ), {_PYTESTS_OWN, *_SET_BY_IMPORTS}):
            os.environ.pop(name, None)
            if name in self.environment:
                os.environ[name] = self.environment[name]

    def restore_console(self) -> None:
        """Takes back that Lightning's bar configures the console of rich anew, by what the environment then says."""
        rich.get_console().__dict__ = self.console


def threads_that_stay(known: Collection[threading.Thread], *, daemons: bool = False) -> list[threading.Thread]:
    """Return the threads that do not end, though they are given the time.

    Some end with an object that waits to be collected; others have been told to end and are about to.

    Args:
        known: Threads that may stay.
        daemons: Daemon threads may not stay either. Default: False.
    """
    started = [thread for thread in threading.enumerate() if thread not in known and (daemons or not thread.daemon)]
    if not started:
        return []
    gc.collect()
    deadline = time.monotonic() + _PATIENCE
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread for thread in started if thread.is_alive()]


def _servers() -> list[psutil.Process]:
    """Return multiprocessing's own, from which tests start others."""
    found = []
    for process in _processes(_children()):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "multiprocessing.forkserver" in " ".join(process.cmdline()):
                found.append(process)
    return found


def _processes(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes of these ids that have not ended."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _ends_with_us(process: psutil.Process) -> bool:
    """Return True for processes that serve this one to its end."""
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
    return any(name in command for name in _ENDING_WITH_US)


def _children(parent: int | None = None) -> set[int]:
    """Return the ids of all child processes of a process, by default of this one.

    The kernel lists them; `psutil` would read the parents of all processes of the machine, after each test.
    """
    tasks = _PROC / str(parent or os.getpid()) / "task"
    if not _PROC.is_dir():
        return {child.pid for child in psutil.Process(parent).children()}
    found: set[int] = set()
    # A thread, or the whole process, may have ended.
    with contextlib.suppress(OSError):
        for task in os.listdir(tasks):
            with contextlib.suppress(OSError):
                found.update(map(int, (tasks / task / "children").read_text().split()))
    return found


def _torch_modes() -> dict[str, Any]:
    distributed = torch.distributed
    return {
        "number of threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic algorithms warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "process group": distributed.is_available() and distributed.is_initialized(),
    }


def _set_torch_modes(modes: dict[str, Any]) -> None:
    torch.set_num_threads(modes["number of threads"])
    torch.set_default_dtype(modes["default dtype"])
    torch.set_grad_enabled(modes["grad mode"])
    torch.use_deterministic_algorithms(
        modes["deterministic algorithms"], warn_only=modes["deterministic algorithms warn only"]
    )
    torch.autograd.set_detect_anomaly(modes["anomaly mode"])
    if not modes["process group"] and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _levels() -> dict[str, int]:
    return {name: logging.getLogger(name).level for name in _LOGGERS}


def _differing(before: dict[Any, Any], after: dict[Any, Any], besides: Collection[str] = ()) -> dict[Any, str]:
    """Return what has another value now, with both values."""
    names = [name for name in {**before, **after} if name not in besides and before.get(name) != after.get(name)]
    return {name: f"{after.get(name)!r} instead of {before.get(name)!r}" for name in names}


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a folder that is gone"


def set_aside_what_is_imported() -> None:
    """Let collections of garbage pass over all objects that exist, which would take most of their time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def quick_collections() -> None:
    """Set aside the objects that earlier tests have left: a recovery collects garbage in each step."""
    set_aside_what_is_imported()


@pytest.fixture(scope="module")
def full_collections() -> Iterator[None]:
    """Let collections look through all objects, as they do for users."""
    gc.unfreeze()
    yield
    set_aside_what_is_imported()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails if something survives a test that others could stumble over."""
    before = Surroundings()
    yield
    complaints = list(before.complaints())
    before.restore_environment()
    before.restore_console()
    if complaints:
        before.restore()
        pytest.fail("The test left something behind. " + "; ".join(complaints) + ".", pytrace=False)
