"""A strategy and a callback in one file each, as their pages in docs show them: short, and exact."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.networks.transparency import Mlp
from tests.support.one_device import OPTIONS, assert_same_run, train
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


class Logged(Mlp):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx))


@pytest.mark.parametrize("options", OPTIONS)
def test_a_strategy_that_halves_the_batch_is_exact(options: str) -> None:
    expected = train(Logged, val=[4, 3], **OPTIONS[options])
    halved = train(Logged, defined_in(STRATEGY, "HalvingStrategy")(), val=[4, 3], **OPTIONS[options])
    assert_same_run(expected, halved)


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
