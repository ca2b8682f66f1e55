"""A process is killed, the run resumes from its last checkpoint, and ends as one that nothing ever happened to."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise import WorkerError
from tests.strategies.ddp.launched.killed_runs import EPOCHS, STEPS, assert_as_undisturbed, train
from tests.strategies.programs import torchrun

pytestmark = pytest.mark.filterwarnings(r"ignore:`fit\(ckpt_path='last'\)`")


@pytest.mark.quick_cases(1)
@pytest.mark.thorough
@pytest.mark.parametrize(("engine", "accumulate"), [("torch", 1), ("native", 2)])
def test_a_killed_run_started_again_continues_with_its_newest_checkpoint_as_if_undisturbed(
    engine: Any, accumulate: int, tmp_path: Path
) -> None:
    print("seed:", seed := random.SystemRandom().randrange(2**32))
    draw = random.Random(seed)
    rank, epoch, batch = draw.randrange(2), draw.randrange(1, EPOCHS), draw.randrange(1, STEPS - 1)
    options: dict[str, Any] = {"engine": engine, "accumulate": accumulate}
    with pytest.raises(WorkerError, match=f"rank {rank} of 2 was killed by SIGKILL"):
        train(tmp_path, rank, STEPS * epoch + batch, **options)
    assert (tmp_path / "last.ckpt").exists()
    resumed = train(tmp_path, rank, STEPS * epoch + batch, **options, seed=99)  # nothing depends on how it is built
    steps_before = epoch * -(-STEPS // accumulate) + batch // accumulate
    assert resumed.began_at == steps_before - steps_before % 2
    assert_as_undisturbed(tmp_path / "undisturbed", resumed.state_dict(), **options)


SCRIPT = """
import sys
from pathlib import Path
import torch
from tests.strategies.ddp.launched.killed_runs import STEPS, train

folder = Path(sys.argv[1])
module = train(folder, 1, STEPS + 3)
if module.global_rank == 0:
    torch.save({"state": module.state_dict(), "began_at": module.began_at}, folder / "result.pt")
"""


@pytest.mark.slow
def test_torchrun_starts_killed_processes_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is killed in the middle of the second epoch, and torchrun starts both once more."""
    script, marker = tmp_path / "script.py", tmp_path / "marker"
    script.write_text(SCRIPT)
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1"]
    assert not torchrun(monkeypatch, script, [str(tmp_path)], options)
    assert marker.exists(), "nobody was killed"
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    assert result["began_at"] == STEPS + 3
    assert_as_undisturbed(tmp_path / "undisturbed", result["state"])
