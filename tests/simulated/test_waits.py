"""Steps do not wait for a device: the host only tells it what to do next."""

from typing import Any

import lightning as L
import pytest
import torch

from tests.conftest import ignoring
from tests.simulated.devices.installation import extension
from tests.support.pipelines import fit
from tests.test_transparency import Mlp

pytestmark = ignoring()


class Logging(Mlp):
    """Logs its loss, and a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("logged", output["loss"] if isinstance(output, dict) else output)
        self.log("number", float(batch_idx), on_epoch=True)
        return output


class Waiting(Mlp):
    """Reads its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        loss = output["loss"] if isinstance(output, dict) else output
        assert torch.isfinite(loss)
        return output


class Reasons(L.Callback):
    """Notes for which reasons the host waits in each step."""

    def __init__(self) -> None:
        self.of_steps: list[list[str]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        extension().take_reasons()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.of_steps.append(extension().take_reasons())


@pytest.mark.parametrize("strategy", ["single_device", "dp", "pipeline"])
def test_steps_do_not_wait(strategy: str) -> None:
    reasons = Reasons()
    devices = 1 if strategy == "single_device" else 2
    fit(Logging, [13] * 4, strategy=strategy, devices=devices, callbacks=[reasons])
    # In the first step a pipeline is cut.
    assert reasons.of_steps[1:] == [[]] * 7


def test_waits_of_the_module_are_seen() -> None:
    reasons = Reasons()
    fit(Waiting, [13] * 4, callbacks=[reasons])
    assert reasons.of_steps == [["aten::_local_scalar_dense"]] * 8
