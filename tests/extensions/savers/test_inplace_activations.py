"""InplaceActivations in a fit: the same run with less memory, and a module that is as before afterwards."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from equipoise import InplaceActivations, MemoryLogger
from tests.support.equality import assert_equal
from tests.support.trainer_runs import loader, refuses, trainer


class Module(L.LightningModule):
    """Activation functions, dropout and statistics; it counts its steps and takes its batch apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(2, 32), nn.ReLU6(), nn.Linear(32, 2), nn.LeakyReLU()) for _ in range(3)]
        self.net = nn.Sequential(nn.BatchNorm1d(2), *layers, nn.Dropout(0.1))
        self.steps: list[int] = []
        self.seen_inplace: list[bool] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.steps.append(batch_idx)
        loss = self.net(batch.pop()).square().mean()
        self.log("loss", loss)
        self.log_dict({"twice": 2 * loss.detach()})
        return {"loss": loss}

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen_inplace.append(self.net[1][1].inplace)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(module: Module, **options: Any) -> Any:
    run = trainer(max_epochs=2, **options)
    run.fit(module, loader(3, 64))
    return run


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_weights_and_logged_values_are_equal_to_the_bit_with_less_memory(precision: str) -> None:
    memories = [MemoryLogger(detail="modules", leaks=False) for _ in range(2)]
    inplace = InplaceActivations()
    module = Module()
    run = fit(module, callbacks=[inplace, memories[0]], precision=precision)
    usual = Module()
    usual_run = fit(usual, callbacks=[memories[1]], precision=precision)
    assert len(inplace.choice.changed) == 6
    assert not inplace.choice.unchanged
    assert_equal(usual, module)
    assert_equal(dict(usual_run.logged_metrics), dict(run.logged_metrics))
    assert module.steps == usual.steps
    assert module.seen_inplace == [True] * 6
    assert not module.net[1][1].inplace
    assert memories[0].compositions[0].nbytes < memories[1].compositions[0].nbytes


class Failing(Module):
    def on_train_batch_end(self, *args: Any) -> None:
        raise RuntimeError("enough")


def test_the_module_is_as_before_after_a_failure() -> None:
    module = Failing()
    with pytest.raises(RuntimeError, match="enough"):
        fit(module, callbacks=[InplaceActivations()])
    assert not any(getattr(part, "inplace", False) for part in module.modules())


class ByHand(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


TWO = {"strategy": "dp", "devices": ["cpu", "cpu"]}


@pytest.mark.parametrize(("kind", "options", "words"), [(ByHand, {}, "optimise by hand"), (Module, TWO, "several")])
def test_manual_optimisation_and_several_devices_are_refused(
    kind: type[Module], options: dict[str, Any], words: str
) -> None:
    refuses(lambda: fit(kind(), callbacks=[InplaceActivations()], **options), words)
