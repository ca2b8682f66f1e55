"""A strategy and a callback in one file each, as their pages in docs show them: short, and exact."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from equipoise import Trainer

ROOT = Path(__file__).parents[1]


def block_with(text: str, page: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    (block,) = [block for block in blocks if text in block]
    return str(block)


STRATEGY = block_with("class HalvingStrategy", "writing_a_strategy.md")
CALLBACK = block_with("class StopOnPlateau", "writing_a_callback.md")

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*' does not have many workers",
    "ignore:Checkpoint directory .* exists and is not empty",
    r"ignore:.*isinstance\(treespec, LeafSpec\)",
)


def defined_in(source: str, name: str) -> Any:
    names: dict[str, Any] = {"__name__": "shown_in_the_documentation"}
    exec(compile(source, "docs", "exec"), names)  # noqa: S102
    return names[name]


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.error = MeanSquaredError()
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.error(self.net(batch[0]), batch[1])
        self.log("error", self.error)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def data(samples: int = 13) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=4)


def trainer(**options: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", devices=1, precision="64-true", **quiet, **options)


def fitted(strategy: Any, tmp_path: Path, **options: Any) -> tuple[Regression, dict[str, Any], Any]:
    torch.manual_seed(0)
    module = Regression()
    run = trainer(strategy=strategy, max_epochs=3, default_root_dir=tmp_path, **options)
    run.fit(module, data(), data(7))
    return module, dict(run.callback_metrics), torch.cat(run.predict(module, data(7)) or [])


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=str)
def test_a_strategy_that_halves_the_batch_is_exact(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = fitted("single_device", tmp_path / "whole", **options)
    halved = fitted(defined_in(STRATEGY, "HalvingStrategy")(), tmp_path / "halves", **options)
    assert expected[0].sizes == [4, 4, 4, 1] * 3
    assert halved[0].sizes == [2, 2, 2, 2, 2, 2, 1] * 3
    for parameter, other in zip(expected[0].parameters(), halved[0].parameters(), strict=True):
        torch.testing.assert_close(other, parameter, rtol=1e-12, atol=1e-12)
    assert halved[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(halved[1][name], value, rtol=1e-12, atol=1e-12, msg=name)
    torch.testing.assert_close(halved[2], expected[2], rtol=1e-12, atol=1e-12)


def test_a_callback_that_stops_on_a_plateau_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    class Flat(Regression):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    make = defined_in(CALLBACK, "StopOnPlateau")
    whole = trainer(max_epochs=10, callbacks=make(patience=9), default_root_dir=tmp_path / "whole", min_steps=1)
    torch.manual_seed(0)
    whole.fit(Flat(), data(4), data(4))
    assert 9 <= whole.global_step <= 10
    begun = trainer(max_epochs=5, callbacks=make(patience=9), default_root_dir=tmp_path / "begun")
    torch.manual_seed(0)
    begun.fit(Flat(), data(4), data(4))
    path = begun.checkpoint_callback.best_model_path
    resumed = trainer(max_epochs=10, callbacks=make(patience=9), default_root_dir=tmp_path / "begun", min_steps=1)
    resumed.fit(Flat(), data(4), data(4), ckpt_path=path)
    assert resumed.global_step == whole.global_step


@pytest.mark.parametrize("source", [STRATEGY, CALLBACK], ids=["strategy", "callback"])
def test_each_is_a_file_of_under_100_lines(source: str) -> None:
    assert len(source.splitlines()) < 100
