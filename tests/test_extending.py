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

from tests.support.equality import assert_equal
from tests.support.trainer_runs import Small, loader, trainer

ROOT = Path(__file__).parents[1]


def block_with(text: str, page: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    (block,) = [block for block in blocks if text in block]
    return str(block)


STRATEGY = block_with("class HalvingStrategy", "writing_a_strategy.md")
CALLBACK = block_with("class StopOnPlateau", "writing_a_callback.md")


def defined_in(source: str, name: str) -> Any:
    names: dict[str, Any] = {"__name__": "shown_in_the_documentation"}
    exec(compile(source, "docs", "exec"), names)  # noqa: S102
    return names[name]


class Regression(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.error = MeanSquaredError().set_dtype(torch.float64)
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


def fitted(strategy: Any, **options: Any) -> tuple[Regression, dict[str, Any], Any]:
    torch.manual_seed(0)
    module = Regression()
    run = trainer(strategy=strategy, max_epochs=2, precision="64-true", **options)
    run.fit(module, data(), data(7))
    return module, dict(run.callback_metrics), torch.cat(run.predict(module, data(7)) or [])


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.1}], ids=str)
def test_a_strategy_that_halves_the_batch_is_exact(options: dict[str, Any]) -> None:
    expected = fitted("single_device", **options)
    halved = fitted(defined_in(STRATEGY, "HalvingStrategy")(), **options)
    assert expected[0].sizes == [4, 4, 4, 1] * 2
    assert halved[0].sizes == [2, 2, 2, 2, 2, 2, 1] * 2
    assert_equal(expected, halved, 1e-12)


def test_a_callback_that_stops_on_a_plateau_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    class Flat(Small):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def fit(epochs: int, **arguments: Any) -> Any:
        callback = defined_in(CALLBACK, "StopOnPlateau")(patience=9)
        run = trainer(max_epochs=epochs, min_steps=1, callbacks=callback)
        torch.manual_seed(0)
        run.fit(Flat(), loader(1), **arguments)
        return run

    whole = fit(12)
    assert 9 <= whole.global_step <= 10
    fit(5).save_checkpoint(tmp_path / "begun.ckpt")
    assert fit(12, ckpt_path=tmp_path / "begun.ckpt").global_step == whole.global_step


@pytest.mark.parametrize("source", [STRATEGY, CALLBACK], ids=["strategy", "callback"])
def test_examples_of_the_documentation_have_under_100_lines(source: str) -> None:
    assert len(source.splitlines()) < 100
