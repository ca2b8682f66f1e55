"""Modules and entries that a pipeline refuses, by the message that names the way out."""

from typing import Any

import lightning as L
import pytest
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.pipeline.strategy.checks import all_are, check_entries, check_module


class ByHand(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnBackward(L.LightningModule):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


@pytest.mark.parametrize(("module", "message"), [(ByHand(), "optimises by hand"), (OwnBackward(), "overrides `back")])
def test_a_backward_that_does_not_run_by_stages(module: nn.Module, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_module(module, training=True)
    check_module(module, training=False)


def test_a_backward_of_lightning() -> None:
    check_module(L.LightningModule(), training=True)


def test_entries() -> None:
    check_entries("speeds", None, 2, 2, 1)
    check_entries("speeds", [1, 2], 2, 2, 1)
    with pytest.raises(ConfigurationError, match=r"speeds must have 2 entries for 2 devices, a stage on each"):
        check_entries("speeds", [1], 2, 2, 1)
    with pytest.raises(ConfigurationError, match=r"cut_before must have 5 entries for 2 devices, 3 on each"):
        check_entries("cut_before", ["a"], 5, 2, 3)


def test_kinds_of_entries() -> None:
    assert all_are(int, [1, 2])
    assert not all_are(int, [1, True])
    assert not all_are(str, 3)
