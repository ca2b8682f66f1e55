"""A device mesh over processes that torchrun has started, each with weights and random numbers of its own."""

from pathlib import Path

import pytest
import torch

from tests.strategies.programs import start_script, torchrun, wait_for

pytestmark = pytest.mark.slow

# A layer is made in `configure_model`, where blocks are cut and sharded.
SCRIPT = """
import sys
import warnings
import torch
from equipoise import FSDPStrategy
from tests.extensions.fsdp import mesh_modules
from tests.extensions.fsdp.programs import fit, weights_of

folder, processes, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
warnings.filterwarnings("error", "The cut layers of")
kind, strategy = getattr(mesh_modules, sys.argv[4]), "single_device"
if processes > 1:
    kind, strategy = getattr(mesh_modules, sys.argv[5]), FSDPStrategy(data=rows, tensor="auto")
module, trainer = fit(kind, strategy, processes, batch_size=12 // rows, module=kind())
torch.save([weights_of(module), trainer.callback_metrics], f"{folder}/{trainer.global_rank}.pt")
"""


@pytest.mark.parametrize(
    ("processes", "rows", "kinds"),
    [(4, 2, ["ByRank", "CutByRank"]), (2, 1, ["HeadsByRank", "CutHeadsByRank"])],
    ids=["other values in each process", "dropout"],
)
def test_training_under_torchrun_equals_that_of_one_device(
    processes: int, rows: int, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone = tmp_path / "alone"
    alone.mkdir()
    wait_for([start_script(script, [str(alone), "1", "1", *kinds])])
    options = ["--standalone", f"--nproc-per-node={processes}"]
    assert torchrun(monkeypatch, script, [str(tmp_path), str(processes), str(rows), *kinds], options) == []
    weights, values = torch.load(alone / "0.pt")
    for rank in range(processes):
        found, logged = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-12)
        torch.testing.assert_close(logged, values, rtol=0, atol=1e-12)
