"""Processes that somebody else has started: torchrun, on one machine or two."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise import ConfigurationError
from equipoise.parallel.process_group import Place, find_place

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

folder, devices, nodes, strategy = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
torch.manual_seed(0)
module, data = Module(), TensorDataset(torch.randn(13, 3))
trainer = Trainer(strategy=strategy, devices=devices, num_nodes=nodes, accelerator="cpu", max_epochs=2, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                  precision="64-true")
whole = DataLoader(data, batch_size=2 if strategy == "ddp" else 4)
trainer.fit(module, whole, DataLoader(data, batch_size=4))
val = float(trainer.callback_metrics["val"])
predicted = torch.cat(trainer.predict(module, DataLoader(data, batch_size=4))).tolist()
result = {"weight": module.net.weight.tolist(), "val": val, "predicted": predicted,
          "rank": trainer.global_rank, "world": trainer.world_size}
with open(f"{folder}/{trainer.global_rank}.json", "w") as file:
    json.dump(result, file)
"""


def start(tmp_path: Path, torchrun: list[str], arguments: list[str], **more: str) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", *torchrun, str(script), str(tmp_path), *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **more})


def results(tmp_path: Path, processes: list[subprocess.Popen[str]]) -> dict[int, Any]:
    for process in processes:
        _, told = process.communicate(timeout=240)
        assert process.returncode == 0, told
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    return {result["rank"]: result for result in found}


def alone(tmp_path: Path) -> Any:
    folder = tmp_path / "alone"
    folder.mkdir()
    return results(folder, [start(folder, [], ["1", "1", "single_device"])])[0]


def same(expected: Any, actual: Any) -> None:
    torch.testing.assert_close(torch.tensor(actual["weight"]), torch.tensor(expected["weight"]), rtol=1e-12, atol=0)
    assert actual["val"] == pytest.approx(expected["val"], rel=1e-12)
    assert actual["predicted"] == expected["predicted"]


def test_torchrun(tmp_path: Path) -> None:
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = results(tmp_path, [start(tmp_path, run, ["2", "1", "ddp"])])
    expected = alone(tmp_path)
    assert sorted(found) == [0, 1]
    for result in found.values():
        assert result["world"] == 2
        same(expected, result)


def test_two_machines(tmp_path: Path) -> None:
    """Two calls of torchrun that know of one another, on one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    run += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank"]
    found = results(tmp_path, [start(tmp_path, [*run, node], ["1", "2", "ddp"]) for node in ("0", "1")])
    expected = alone(tmp_path)
    assert sorted(found) == [0, 1]
    for result in found.values():
        same(expected, result)


def test_slurm(tmp_path: Path) -> None:
    """Two processes as `srun` starts them; they meet where Slurm's list of machines says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    slurm = {"SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": "1234", "MASTER_PORT": str(port)}
    processes = [
        start(tmp_path, [], ["2", "1", "ddp"], SLURM_PROCID=rank, SLURM_LOCALID=rank, **slurm) for rank in ("0", "1")
    ]
    found, expected = results(tmp_path, processes), alone(tmp_path)
    assert sorted(found) == [0, 1]
    for result in found.values():
        same(expected, result)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Place(3, 1, 1, 4, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 1, 0, 2, None)),
        (
            {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"},
            Place(5, 1, 1, 8, None),
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "bash"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
    ],
)
def test_places(environment: dict[str, str], place: Place | None) -> None:
    assert find_place(environment) == place


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "says RANK=1, but not WORLD_SIZE.*torchrun"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one', which is no number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, but WORLD_SIZE=2: ranks count from 0"),
    ],
)
def test_places_that_cannot_be(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_place(environment)
