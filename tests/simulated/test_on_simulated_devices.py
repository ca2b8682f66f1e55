"""The tests of the pipeline and of GPUs, and those of the simulation, on two CUDA devices simulated on a CPU.

CUDA must be there before torch is asked for it, so groups of files run in processes of their own.
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
PIPELINE = "tests/extensions/pipeline"
STRATEGY = f"{PIPELINE}/strategy"
SIMULATED = "tests/simulated"
# Files that run one after the other in one process: an interpreter takes seconds to import everything.
GROUPS = {
    "simulation": [
        *(f"{SIMULATED}/test_{name}.py" for name in ("simulation", "streams", "replicas")),
        *(f"{SIMULATED}/test_{name}.py" for name in ("recovery", "defects", "prefetch", "planning")),
        *(f"{SIMULATED}/steps/test_{name}.py" for name in ("launches", "waits", "regions")),
        *(f"{SIMULATED}/configurations/test_{name}.py" for name in ("configurations", "resumption", "processes")),
        "tests/extensions/savers/test_offloading.py",
        # A captured graph keeps nodes of autograd, of which torch warns in a run of several devices behind it.
        f"{SIMULATED}/test_graphs.py",
        *(f"{SIMULATED}/captured/test_{name}.py" for name in ("equal", "gradients", "host_work", "runs")),
    ],
    "pipeline": [
        *(f"{STRATEGY}/test_{name}.py" for name in ("pipeline", "zero_bubble", "checkpoints")),
        *(f"{STRATEGY}/test_{name}.py" for name in ("library_models", "faults")),
        f"{PIPELINE}/stack/test_stacks.py",
        "tests/strategies/replicated",
    ],
    "processes": [f"{PIPELINE}/processes/test_processes.py", f"{STRATEGY}/test_averages.py"],
}
# One case of each test runs: further cases differ in numbers, not in devices. All cases of a file run with
# `python -m pytest -p tests.simulated.plugin -m "" FILE`.
THINNED = ["pipeline", "processes"]
# Their workers compute, and look themselves on which devices.
COMPUTED_BY_WORKERS = [f"{SIMULATED}/configurations/test_processes.py"]
# One device is enough for them.
ON_ONE_DEVICE = [
    "tests/extensions/savers/test_offloading.py",
    f"{SIMULATED}/test_graphs.py",
    f"{SIMULATED}/captured/",
]
TIMEOUT = 800.0  # seconds for one group, less than the tests' own


@pytest.fixture(scope="module")
def extension() -> Path:
    """The compiled extension; where it cannot be compiled there is no simulation."""
    try:
        return built_extension()
    except NotBuildable as reason:
        pytest.skip(f"no devices can be simulated: {reason}")


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("group", GROUPS)
def test_files(group: str) -> None:
    arguments = ["-p", "tests.simulated.plugin", "-m", "not slow", *GROUPS[group]]
    if group in THINNED:
        arguments += ["--most-cases", "1"]
    output = check(*arguments)
    for path in GROUPS[group]:
        check_launches(path, output)


@pytest.mark.usefixtures("extension")
def test_what_needs_a_gpu() -> None:
    check("-p", "tests.simulated.as_gpus", "-m", "not slow", "tests/gpu")


def check(*arguments: str) -> str:
    """Run tests, which must pass, and return their output."""
    code, output = run(*arguments)
    assert code == 0, output
    assert re.search(r"\d+ passed", output), output
    return output


def check_launches(path: str, output: str) -> None:
    """See that the tests of a file, or of a folder, computed on the simulated devices of their process."""
    if path in COMPUTED_BY_WORKERS:
        return
    of_files = re.findall(rf"devices in {re.escape(path)}\S*: cuda:0 (\d+), cuda:1 (\d+)", output)
    assert of_files, f"no tests of {path} ran:\n{output}"
    is_used = [any(int(counts[device]) > 0 for counts in of_files) for device in range(2)]
    least = 1 if path.startswith(tuple(ON_ONE_DEVICE)) else 2
    assert sum(is_used) >= least, f"{path} computed elsewhere:\n{output}"


def run(*arguments: str) -> tuple[int, str]:
    """Run pytest in a process of its own; return its exit code, and the end of its output."""
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
