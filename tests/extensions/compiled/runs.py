"""Fits of the networks of `tests.support.step_networks` whose steps are eager or compiled, and their comparison."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from tests.support.equality import assert_equal
from tests.support.lowering import Lowering
from tests.support.step_networks import SIZES, Network, batches
from tests.support.trainer_runs import trainer

__all__ = ["STAYS_EAGER", "Fitted", "assert_compiled", "assert_same", "assert_stays_eager", "fit"]

STAYS_EAGER = "the training step stays eager"


class Losses(L.Callback):
    """Notes the loss of each batch; 0 where there is none."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["loss"] if outputs else torch.zeros(()))


class Fitted:
    """A finished fit.

    Attributes:
        module: The module.
        values: Its state, the logged values, the losses, and what the module has noted by itself.
    """

    def __init__(self, module: L.LightningModule, losses: list[Any]) -> None:
        self.module: Any = module
        noted = {name: value for name, value in vars(module).items() if name in ("noted", "gradients")}
        self.values = [module.state_dict(), dict(module.trainer.callback_metrics), losses, noted]


def fit(
    module: L.LightningModule, sizes: Sequence[int] = SIZES, ckpt_path: Path | None = None, **options: Any
) -> Fitted:
    """Train for two epochs in float64 with batches of these sizes."""
    losses = Losses()
    callbacks = [losses, *options.pop("callbacks", [])]
    run = trainer(**{"max_epochs": 2, "precision": "64-true", "devices": 1, **options}, callbacks=callbacks)
    torch.manual_seed(11)
    random.seed(11)
    run.fit(module, batches(sizes), ckpt_path=ckpt_path)
    return Fitted(module, losses.seen)


def assert_same(eager: Fitted, compiled: Fitted, tolerance: float = 1e-11) -> None:
    assert_equal(eager.values, compiled.values, tolerance)


def assert_compiled(lowering: Lowering, make: Any = Network, sizes: Sequence[int] = SIZES, **options: Any) -> Fitted:
    """Assert that compiled steps compute what eager ones do, and that most steps were compiled.

    Args:
        lowering: What stands in for the compiler's backend.
        make: Makes the module.
        sizes: The sizes of the batches.
        options: Arguments of the trainer; a function `callbacks` makes new ones for each of both fits.
    """
    make_callbacks = options.pop("callbacks", list)
    eager = fit(make(), sizes, callbacks=make_callbacks(), **options)
    compiled = fit(make(), sizes, callbacks=make_callbacks(), compile=True, **options)
    assert_same(eager, compiled)
    assert lowering.calls >= len(sizes)
    return compiled


def assert_stays_eager(make: Any, reason: str, **options: Any) -> None:
    """Assert that a warning has the reason (a pattern) why steps stay eager, which compute what they always do."""
    make_callbacks = options.pop("callbacks", list)
    options = {"max_epochs": 1, **options}
    eager = fit(make(), [5] * 5, callbacks=make_callbacks(), **options)
    state = random.getstate()
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER}.*{reason}"):
        compiled = fit(make(), [5] * 5, callbacks=make_callbacks(), compile=True, **options)
    assert_same(eager, compiled)
    assert random.getstate() == state
    assert torch.is_grad_enabled()
