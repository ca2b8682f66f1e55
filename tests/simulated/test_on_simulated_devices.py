"""The tests of the pipeline and of GPUs, and those of the simulation, on two CUDA devices simulated on a CPU.

CUDA must be there before torch is asked for it, so each file runs in a process of its own.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated.devices.build import NotBuildable, built_extension

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PIPELINE = "tests/strategies/pipeline"
FILES = [
    *(f"tests/simulated/test_{name}.py" for name in ("simulation", "streams", "graphs", "replicas")),
    *(f"tests/simulated/test_{name}.py" for name in ("recovery", "defects", "prefetch")),
    *(f"tests/simulated/configurations/test_{name}.py" for name in ("configurations", "resumption", "processes")),
    *(f"tests/simulated/steps/test_{name}.py" for name in ("launches", "waits", "regions")),
    *(f"tests/simulated/captured/test_{name}.py" for name in ("equal", "host_work", "runs")),
    "tests/strategies/replicated",
    "tests/parallel/savers/test_offloading.py",
    *(f"{PIPELINE}/test_{name}.py" for name in ("pipeline", "loops", "zero_bubble", "checkpoints", "library_models")),
    *(f"{PIPELINE}/test_{name}.py" for name in ("loss_profile", "stacks", "faults", "processes", "process_loops")),
]
# Their workers compute, and look themselves on which devices.
COMPUTED_BY_WORKERS = ["tests/simulated/configurations/test_processes.py"]
# One device is enough for them.
ON_ONE_DEVICE = [
    "tests/parallel/savers/test_offloading.py",
    "tests/simulated/test_graphs.py",
    *(path for path in FILES if path.startswith("tests/simulated/captured/")),
]
TIMEOUT = 800.0  # seconds for one file, less than the tests' own


@pytest.fixture(scope="module")
def extension() -> Path:
    """The compiled extension; where it cannot be compiled there is no simulation."""
    try:
        return built_extension()
    except NotBuildable as reason:
        pytest.skip(f"no devices can be simulated: {reason}")


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("file", FILES)
def test_file(file: str) -> None:
    check("tests.simulated.plugin", file)


@pytest.mark.usefixtures("extension")
def test_what_needs_a_gpu() -> None:
    check("tests.simulated.as_gpus", "tests/gpu")


def check(plugin: str, path: str) -> None:
    """Run tests; all must pass, and the devices compute in this process, unless workers alone do."""
    # The further cases of a test differ in numbers, not in devices.
    code, output = run("-p", plugin, "-m", "not slow", path)
    assert code == 0, output
    assert re.search(r"\d+ passed", output), output
    if path in COMPUTED_BY_WORKERS:
        return
    launches = [int(count) for count in re.findall(r"cuda:\d \(simulated\) has launched (\d+) kernels", output)]
    assert len(launches) == 2, output
    assert sum(count > 0 for count in launches) >= (1 if path in ON_ONE_DEVICE else 2), output


def run(*arguments: str) -> tuple[int, str]:
    """Run pytest in a process of its own; return its exit code, and the end of what it has written."""
    foreign = ("PYTEST_", "COVERAGE_")  # of the process that runs this test
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=short", "-p", "no:cacheprovider", *arguments]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except BaseException:
            # With its workers, which would write into the pipe.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output[-8000:]
