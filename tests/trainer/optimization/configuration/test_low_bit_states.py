"""Optimisers of the user with a state of 8 bits or in bfloat16: fits, memory to the byte, checkpoints, resumption."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from equipoise import MemoryLogger
from tests.support.equality import assert_equal
from tests.support.trainer_runs import trainer


class LowBits(Optimizer):
    """Momentum in few bits, as libraries keep it."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                momentum = parameter.grad + (0.9 * self.read(state) if state else 0.0)
                self.write(state, momentum)
                parameter.sub_(momentum, alpha=self.param_groups[0]["lr"])
        return loss

    def read(self, state: dict[str, Any]) -> Tensor: ...

    def write(self, state: dict[str, Any], momentum: Tensor) -> None: ...


class Quantised(LowBits):
    """8 bits, with a scale for each tensor."""

    def read(self, state: dict[str, Any]) -> Tensor:
        assert (state["codes"].dtype, state["scale"].dtype) == (torch.int8, torch.bfloat16)
        return state["codes"].float() * state["scale"].float()

    def write(self, state: dict[str, Any], momentum: Tensor) -> None:
        state["scale"] = (momentum.abs().amax() / 127).bfloat16()
        codes = momentum / state["scale"].float().clamp_min(1e-12)
        state["codes"] = codes.round().clamp(-127, 127).to(torch.int8)


class Halved(LowBits):
    """bfloat16."""

    def read(self, state: dict[str, Any]) -> Tensor:
        assert state["momentum"].dtype is torch.bfloat16
        return state["momentum"].float()

    def write(self, state: dict[str, Any], momentum: Tensor) -> None:
        state["momentum"] = momentum.bfloat16()


class Module(L.LightningModule):
    def __init__(self, kind: type[Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
        self.kind = kind

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        if self.kind is SGD:
            return SGD(self.parameters(), 0.1, momentum=0.9)
        return self.kind(self.parameters())


def fit(module: Module, ckpt_path: Path | None = None, **options: Any) -> Module:
    data = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    run = trainer(**{"max_epochs": 2, **options})
    run.fit(module, DataLoader(TensorDataset(data), 4), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("kind", [Quantised, Halved])
def test_low_bit_states_are_resumed_to_the_bit(kind: type[Optimizer], tmp_path: Path) -> None:
    whole = fit(Module(kind))
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    fit(Module(kind), callbacks=[saves], enable_checkpointing=True, max_epochs=1)
    path = next(tmp_path.glob("*step=5*.ckpt"))
    with pytest.warns(UserWarning, match="states of callbacks that are missing"):
        resumed = fit(Module(kind), path)
    assert_equal(whole, resumed)
    assert_equal(*(module.trainer.optimizers[0].state_dict()["state"] for module in (whole, resumed)))


def test_a_state_of_the_usual_dtype_follows_its_parameter(tmp_path: Path) -> None:
    """A run that continues in another precision has its states in that precision, as in torch."""
    saves = ModelCheckpoint(tmp_path, save_last=True)
    fit(Module(SGD), callbacks=[saves], enable_checkpointing=True, max_epochs=1, precision="bf16-true")
    with pytest.warns(UserWarning, match="states of callbacks that are missing"):
        resumed = fit(Module(SGD), tmp_path / "last.ckpt", precision="32-true")
    for state in resumed.trainer.optimizers[0].state.values():
        assert state["momentum_buffer"].dtype is torch.float32


def test_memory_of_low_bit_states_is_counted_to_the_byte() -> None:
    states = {}
    parameters = 32 * 64 + 64 + 64 * 32 + 32
    for kind in (SGD, Halved, Quantised):
        memory = MemoryLogger(detail="modules", leaks=False)
        fit(Module(kind), callbacks=[memory], max_steps=3)
        states[kind] = memory.compositions[0].totals()["optimizer state"]
    assert states == {SGD: 4 * parameters, Halved: 2 * parameters, Quantised: parameters + 4 * 2}
