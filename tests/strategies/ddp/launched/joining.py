"""A script that trains in processes somebody else has started, and what these must have in common with one device.

Its arguments are a folder for the results, and the arguments of the trainer as JSON.
"""

import json
from pathlib import Path
from typing import Any

from tests.strategies.programs import start_script, wait_for
from tests.support.equality import assert_equal

__all__ = ["check", "script_in"]

SCRIPT = """
import json, sys
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from equipoise import Trainer

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
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
trainer.fit(module, DataLoader(data, batch_size=4 // trainer.world_size), DataLoader(data, batch_size=4))
val = float(trainer.callback_metrics["val"])
assert not torch.distributed.is_initialized(), "the process group of the fit is open"
predicted = torch.cat(trainer.predict(module, DataLoader(data, batch_size=4))).tolist()
result = {"weights": [weight.tolist() for weight in module.parameters()], "val": val, "predicted": predicted,
          "drawn": torch.rand(()).item(), "rank": trainer.global_rank, "world": trainer.world_size,
          "machines": trainer.num_nodes, "strategy": type(trainer.connected_strategy).__name__}
with open(f"{folder}/{trainer.global_rank}.json", "w") as file:
    json.dump(result, file)
"""


def script_in(folder: Path) -> Path:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return script


def results(folder: Path) -> dict[int, Any]:
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {result["rank"]: result for result in found}


def alone(folder: Path) -> Any:
    folder = folder / "alone"
    folder.mkdir()
    said = json.dumps({"strategy": "single_device", "devices": 1})
    wait_for([start_script(script_in(folder), [str(folder), said])])
    return results(folder)[0]


def check(folder: Path, machines: int = 1) -> None:
    """See that both processes end with the same module, results and random numbers, those of one device."""
    found, expected = results(folder), alone(folder)
    assert sorted(found) == [0, 1]
    for result in found.values():
        numbers = {name: expected[name] for name in ("weights", "val", "predicted", "drawn")}
        place = {"rank": result["rank"], "world": 2, "machines": machines, "strategy": "DDPStrategy"}
        assert_equal({**numbers, **place}, result, 1e-12)
