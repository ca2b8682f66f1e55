"""Modules that fail in a stage, and a script that several processes run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from torch import Tensor, nn

from tests.strategies.programs import start_script, wait_for
from tests.support.pipelines import stay_whole

__all__ = ["SCRIPT", "Faulty", "check_joined", "nobody_is_left", "results", "script_in"]


def nobody_is_left() -> None:
    """Check that no worker is left."""
    for child in psutil.Process().children():
        assert not child.children(), "a worker is left"


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, how: Callable[[], None]) -> Tensor:
        ctx.how = how
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.how()
        return gradients[0], None


class Layer(nn.Module):
    """Fails in one of its calls; which, is counted where it runs."""

    def __init__(self, place: str, how: Callable[[], None], at: int) -> None:
        super().__init__()
        self.linear, self.place, self.how, self.at, self.calls = nn.Linear(3, 3), place, how, at, 0
        self.evaluations = 0

    def forward(self, value: Tensor) -> Tensor:
        stay_whole(value)
        self.calls += self.training
        self.evaluations += not self.training
        # The main process records the first call of an evaluation.
        now = self.calls == self.at if self.training else self.evaluations == 2
        if now and self.place == ("forward" if self.training else "validation"):
            self.how()
        made = self.linear(value)
        return FailsBackward.apply(made, self.how) if now and self.training and self.place == "backward" else made


class Faulty(L.LightningModule):
    """Layers `net.0`, `net.1` and so on, one of which fails.

    Args:
        place: Where: "forward", "backward", or "validation".
        how: What it does then.
        stage: Which layer.
        at: In which call of the training. Default: the third.
        stages: The number of layers. Default: 3.
    """

    def __init__(self, place: str, how: Callable[[], None], stage: int, at: int = 3, stages: int = 3) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Layer(place if each == stage else "", how, at) for each in range(stages)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# Its arguments: the folder for results, the devices, the nodes, the engine or "none", and "fails".
SCRIPT = """
import json, os, sys
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from equipoise import PipelineStrategy, Trainer

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    def training_step(self, batch, batch_idx):
        if fails and batch_idx == 1:
            raise RuntimeError("on purpose")
        return self.net(batch[0]).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).square().mean())
    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])[:, 0]
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

folder, devices, nodes, engine = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
fails = "fails" in sys.argv
torch.manual_seed(0)
module, data = Module(), TensorDataset(torch.randn(13, 3))
strategy = "single_device" if engine == "none" else PipelineStrategy(engine=engine)
trainer = Trainer(strategy=strategy, devices=devices, num_nodes=nodes, accelerator="cpu", max_epochs=2, logger=False,
                  enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                  precision="64-true")
trainer.fit(module, DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))
val = float(trainer.callback_metrics["val"])
predicted = torch.cat(trainer.predict(module, DataLoader(data, batch_size=4))).tolist()
weights = [parameter.tolist() for parameter in module.parameters()]
rank = int(os.environ.get("RANK", 0))
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({"weights": weights, "val": val, "predicted": predicted, "rank": trainer.global_rank}, file)
"""


def script_in(folder: Path) -> Path:
    """The script as a file."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return script


def results(folder: Path) -> list[Any]:
    """Return what the processes have written, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def check_joined(folder: Path, count: int) -> None:
    """Check that all scripts end with the same module and results, those of one device."""
    found, alone = results(folder), folder / "alone"
    alone.mkdir()
    wait_for([start_script(script_in(folder), [str(alone), "1", "1", "none"])])
    (expected,) = results(alone)
    assert [result["rank"] for result in found] == list(range(count))
    for result in found:
        for actual, weight in zip(result["weights"], expected["weights"], strict=True):
            torch.testing.assert_close(torch.tensor(actual), torch.tensor(weight), rtol=1e-12, atol=1e-12)
        assert result["val"] == pytest.approx(expected["val"], rel=1e-12)
        assert result["predicted"] == pytest.approx(expected["predicted"], rel=1e-12)
