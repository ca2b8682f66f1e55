"""A sample of the programs that are killed within an epoch, and that the benchmark notices what is lost."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.benchmarks import BENCHMARKS

# Programs are forked, which needs a process that has computed nothing.
SAMPLE = """
import sys
from pathlib import Path
from main import check
for name in sys.argv[2:]:
    print(check(name, 4, Path(sys.argv[1]) / name, kills=1))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("names", [("CountedAfterSteps", "Accumulation"), ("StreamThatCounts", "MadeAtTheEpochsStart")])
def test_killed_programs_end_as_undisturbed_ones(names: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAMPLE, str(tmp_path), *names]
    run = subprocess.run(command, cwd=BENCHMARKS / "resumed_epochs", capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    results = [line for line in run.stdout.splitlines() if line.startswith("killed in")]
    assert len(results) == len(names)
    assert all(line.endswith(": equal") for line in results), results
