"""Processes that somebody else has started: torchrun, on one machine or two."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies.ports import unused_port

SCRIPT = """
import json, sys
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from equipoise import Trainer

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).square().mean())
    def predict_step(self, batch, batch_idx):
        return batch[0][:, 0]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

folder, said = sys.argv[1], json.loads(sys.argv[2])
torch.manual_seed(0)
module, data = Module(), TensorDataset(torch.randn(13, 3))
trainer = Trainer(**said, accelerator="cpu", max_epochs=2, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                  precision="64-true")
whole = DataLoader(data, batch_size=4 // trainer.world_size)
trainer.fit(module, whole, DataLoader(data, batch_size=4))
val = float(trainer.callback_metrics["val"])
predicted = torch.cat(trainer.predict(module, DataLoader(data, batch_size=4))).tolist()
result = {"weight": module.net.weight.tolist(), "val": val, "predicted": predicted,
          "rank": trainer.global_rank, "world": trainer.world_size,
          "machines": trainer.num_nodes, "strategy": type(trainer.connected_strategy).__name__}
with open(f"{folder}/{trainer.global_rank}.json", "w") as file:
    json.dump(result, file)
"""


def start(tmp_path: Path, torchrun: list[str], said: dict[str, Any], **more: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", *torchrun, str(script), str(tmp_path), json.dumps(said)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **more})


def results(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> dict[int, Any]:
    try:
        for process in processes:
            _, printed = process.communicate(timeout=600)
            assert process.returncode == 0, printed
    finally:
        for process in processes:
            process.kill()  # without effect on one that has ended
            process.communicate()
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    return {result["rank"]: result for result in found}


def alone(tmp_path: Path) -> Any:
    folder = tmp_path / "alone"
    folder.mkdir()
    return results(folder, [start(folder, [], {"strategy": "single_device", "devices": 1})])[0]


def same(expected: Any, actual: Any) -> None:
    torch.testing.assert_close(torch.tensor(actual["weight"]), torch.tensor(expected["weight"]), rtol=1e-12, atol=0)
    assert actual["val"] == pytest.approx(expected["val"], rel=1e-12)
    assert actual["predicted"] == expected["predicted"]


@pytest.mark.slow
@pytest.mark.parametrize("said", [{"strategy": "ddp", "devices": 2, "num_nodes": 1}, {}], ids=["said", "auto"])
def test_torchrun(tmp_path: Path, said: dict[str, Any]) -> None:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = results(tmp_path, [start(tmp_path, run, said)])
    expected = alone(tmp_path)
    assert sorted(found) == [0, 1]
    for result in found.values():
        assert (result["world"], result["machines"], result["strategy"]) == (2, 1, "DDPStrategy")
        same(expected, result)


@pytest.mark.slow
def test_two_machines(tmp_path: Path) -> None:
    """Two calls of torchrun that know of one another, on one."""
    port = unused_port()
    run = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    run += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank"]
    found = results(tmp_path, [start(tmp_path, [*run, node], {}) for node in ("0", "1")])
    expected = alone(tmp_path)
    assert sorted(found) == [0, 1]
    for result in found.values():
        assert (result["world"], result["machines"]) == (2, 2)
        same(expected, result)


@pytest.mark.slow
def test_slurm(tmp_path: Path) -> None:
    """Two processes as `srun` starts them; they meet where Slurm's list of machines says."""
    port = unused_port()
    slurm = {"SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": "1234", "MASTER_PORT": str(port)}
    slurm |= {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
    processes = [start(tmp_path, [], {}, SLURM_PROCID=rank, SLURM_LOCALID=rank, **slurm) for rank in ("0", "1")]
    found, expected = results(tmp_path, processes), alone(tmp_path)
    assert sorted(found) == [0, 1]
    for result in found.values():
        same(expected, result)
