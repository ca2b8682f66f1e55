"""Rules for every test: random numbers and hypotheses that can be repeated, one thread, and nothing left behind.

The guard below is there for every test: after it, and after all its fixtures, the process is as it was before.
"""

import gc
import importlib.util
import os
import random
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import hypothesis
import numpy
import pytest
import rich
import torch
from fsspec import AbstractFileSystem

from equipoise.interop.versions import warn_of_untested_versions
from equipoise.parallel.workers.preloading import preload
from tests.simulated.devices.installation import is_installed
from tests.support.quick_cases import mark_further_cases
from tests.support.surroundings import Surroundings

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


# Files elsewhere


def _empty_memory() -> AbstractFileSystem:
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    return files


@pytest.fixture
def memory_files() -> Iterator[AbstractFileSystem]:
    """Return the file system in memory, empty before and after; all tests of a process share it."""
    yield _empty_memory()
    _empty_memory()


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
    if config.option.markexpr.startswith("not slow") and os.environ.get("EQUIPOISE_TEST_ALL") != "1":
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


# Nothing is left behind.


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
