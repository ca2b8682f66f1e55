"""Sources of any length in any process: no program stands still, and each trains as one process does."""

import shutil
from pathlib import Path

import pytest

from tests.strategies.programs import torchrun

SCRIPT = Path(__file__).with_name("uneven_programs.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "processes", "first", "number"),
    # By that many, nearly all pairs of what is drawn have occurred: 204 of 206 in 60 programs, and 190 in 30.
    [("ddp", 2, 100, 60), ("ddp", 3, 200, 30), ("fsdp", 2, 300, 30)],
)
def test_random_programs_with_uneven_sources_train_as_one_process_and_resume(
    strategy: str, processes: int, first: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torchrun writes beside the script.
    script = Path(shutil.copy(SCRIPT, tmp_path))
    arguments = [str(tmp_path), strategy, str(first), str(number), str(processes)]
    assert torchrun(monkeypatch, script, arguments, ["--nproc-per-node", str(processes)]) == []
    done = {path.name for path in tmp_path.glob("*.done")}
    assert done == {f"{seed}.done" for seed in range(first, first + number)}
