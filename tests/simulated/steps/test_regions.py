"""A step opens no new regions of autocast or inference mode: each costs the host tens of microseconds on CUDA."""

from typing import Any

import lightning as L
import pytest
import torch

from tests.simulated.steps.waits import STRATEGIES, Logging, reasons_of


class Regions(L.Callback):
    """Counts the regions that are constructed after the first step.

    Args:
        monkeypatch: Replaces the constructors.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.constructed: list[str] = []
        for kind in (torch.autocast, torch.inference_mode):
            monkeypatch.setattr(kind, "__init__", self._counting(kind))

    def _counting(self, kind: Any) -> Any:
        construct = kind.__init__

        def counted(region: Any, *args: Any, **kwargs: Any) -> None:
            self.constructed.append(kind.__name__)
            construct(region, *args, **kwargs)

        return counted

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 1:
            self.constructed.clear()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_construct_no_regions(strategy: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, devices = STRATEGIES[strategy]
    regions = Regions(monkeypatch)
    reasons_of(Logging, make(), devices, precision=precision, callbacks=[regions])
    # Regions are reused. The threads of two devices may be in one at the same time only in a later step.
    most = len(set(devices)) - 1 if precision == "bf16-mixed" else 0
    assert len(regions.constructed) <= most, regions.constructed
