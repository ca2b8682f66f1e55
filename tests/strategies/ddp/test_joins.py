"""Processes that somebody else has started: torchrun, on one machine or two, and Slurm."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies.programs import start_script, torchrun, wait_for
from tests.support.ports import unused_port

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


def script_in(tmp_path: Path) -> Path:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return script


def results(folder: Path) -> dict[int, Any]:
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {result["rank"]: result for result in found}


def alone(tmp_path: Path) -> Any:
    folder = tmp_path / "alone"
    folder.mkdir()
    said = json.dumps({"strategy": "single_device", "devices": 1})
    wait_for([start_script(script_in(tmp_path), [str(folder), said])])
    return results(folder)[0]


def same(expected: Any, actual: Any) -> None:
    torch.testing.assert_close(torch.tensor(actual["weight"]), torch.tensor(expected["weight"]), rtol=1e-12, atol=0)
    assert actual["val"] == pytest.approx(expected["val"], rel=1e-12)
    assert actual["predicted"] == expected["predicted"]


def check(tmp_path: Path, machines: int = 1) -> None:
    """Both processes end with the same module and results, those of one device."""
    found, expected = results(tmp_path), alone(tmp_path)
    assert sorted(found) == [0, 1]
    for result in found.values():
        assert (result["world"], result["machines"], result["strategy"]) == (2, machines, "DDPStrategy")
        same(expected, result)


@pytest.mark.parametrize("said", [{"strategy": "ddp", "devices": 2, "num_nodes": 1}, {}], ids=["said", "auto"])
def test_torchrun(tmp_path: Path, said: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--standalone", "--nproc-per-node", "2"]
    assert not torchrun(monkeypatch, script_in(tmp_path), [str(tmp_path), json.dumps(said)], options)
    check(tmp_path)


def test_two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of torchrun that know of one another, on one."""
    options = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
    options += ["--master-port", str(unused_port()), "--node-rank"]
    calls = [[*options, node] for node in ("0", "1")]
    assert not torchrun(monkeypatch, script_in(tmp_path), [str(tmp_path), "{}"], *calls)
    check(tmp_path, machines=2)


def test_slurm(tmp_path: Path) -> None:
    """Two processes as `srun` starts them; they meet where Slurm's list of machines says."""
    slurm = {"SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": "1234"}
    slurm |= {"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
    slurm |= {"MASTER_PORT": str(unused_port())}
    script, arguments = script_in(tmp_path), [str(tmp_path), "{}"]
    tasks = [{**slurm, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in ("0", "1")]
    wait_for([start_script(script, arguments, **task) for task in tasks])
    check(tmp_path)


def test_a_machine_that_joined_later(tmp_path: Path) -> None:
    """Its agent of torchrun has restarted its processes less often than the others."""
    torchrun = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    torchrun |= {"MASTER_PORT": str(unused_port()), "TORCHELASTIC_USE_AGENT_STORE": "False", "LOCAL_RANK": "0"}
    script, arguments = script_in(tmp_path), [str(tmp_path), "{}"]
    nodes = [
        {**torchrun, "RANK": rank, "GROUP_RANK": rank, "TORCHELASTIC_RESTART_COUNT": restarts}
        for rank, restarts in (("0", "3"), ("1", "0"))
    ]
    wait_for([start_script(script, arguments, **node) for node in nodes])
    check(tmp_path, machines=2)
