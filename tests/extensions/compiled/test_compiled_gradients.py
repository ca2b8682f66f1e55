"""Gradients of compiled steps: those that hooks change, and those of tensors that are no parameters."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.extensions.compiled.conftest import Lowering
from tests.extensions.compiled.test_compiled_step import STAYS_EAGER, assert_same, fit
from tests.support.step_networks import (
    CLASSES,
    Apart,
    Halving,
    LoggingRate,
    Network,
    OfBatch,
    Replacing,
    Shared,
)


@pytest.mark.parametrize("make", [Halving, Replacing, Apart, Shared, LoggingRate])
def test_equal_to_eager_steps(lowering: Lowering, make: type[Network]) -> None:
    options = {"gradient_clip_val": 0.05}
    eager = fit(make(), **options)
    assert_same(fit(make(), compile=True, **options), eager)
    assert lowering.calls >= 9


def test_the_gradient_of_a_batch(lowering: Lowering) -> None:
    """The trial has one of its own."""
    eager = fit(OfBatch())
    compiled = fit(OfBatch(), compile=True)
    assert_same(compiled, eager)
    torch.testing.assert_close(compiled[0].gradients, eager[0].gradients, rtol=1e-11, atol=1e-11)
    assert lowering.calls >= 9


class Sparse(Network):
    """The traced graph ends with an error in the midst, where it has turned off gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, 4, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        return {"loss": result["loss"] + self.table(batch[1]).square().mean()}


def test_an_error_in_the_midst_of_a_graph(lowering: Lowering) -> None:
    eager = fit(Sparse())
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER}, because a compiled one ends with an error"):
        compiled = fit(Sparse(), compile=True)
    assert_same(compiled, eager)
    assert torch.is_grad_enabled()


class LooksForAnomalies(Network):
    """Turns on what `Trainer(detect_anomaly=True)` turns on."""

    def on_train_start(self) -> None:
        torch.autograd.set_detect_anomaly(True)


def test_an_anomaly_is_looked_for(lowering: Lowering) -> None:
    eager = fit(LooksForAnomalies())
    with pytest.warns(UserWarning, match=f"{STAYS_EAGER}, because detect_anomaly"):
        compiled = fit(LooksForAnomalies(), compile=True)
    assert_same(compiled, eager)
    assert not lowering.calls
