"""Optimisers of the user with a state of 8 bits: fits, memory to the byte, checkpoints, resumption."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

from equipoise import MemoryLogger
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Small, trainer, with_optimizers


class Quantised(Optimizer):
    """Momentum in 8 bits with a scale for each tensor, as libraries keep it."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for parameter in self.param_groups[0]["params"]:
            state, momentum = self.state[parameter], parameter.grad
            if state:
                assert (state["codes"].dtype, state["scale"].dtype) == (torch.int8, torch.bfloat16)
                momentum = momentum + 0.9 * state["codes"].float() * state["scale"].float()
            state["scale"] = (momentum.abs().amax() / 127).bfloat16()
            codes = momentum / state["scale"].float().clamp_min(1e-12)
            state["codes"] = codes.round().clamp(-127, 127).to(torch.int8)
            parameter.sub_(momentum, alpha=self.param_groups[0]["lr"])
        return loss


def module(kind: type[Optimizer]) -> Small:
    torch.manual_seed(0)
    options: dict[str, Any] = {"momentum": 0.9} if kind is SGD else {}
    return with_optimizers(lambda m: kind(m.parameters(), lr=0.1, **options))  # type: ignore[call-arg]


def fit(module: Small, ckpt_path: Path | None = None, **options: Any) -> Small:
    data = torch.randn(32, 2, generator=torch.Generator().manual_seed(1))
    trainer(**{"max_epochs": 2, **options}).fit(module, DataLoader(TensorDataset(data), 4), ckpt_path=ckpt_path)
    return module


def test_low_bit_states_are_resumed_to_the_bit(tmp_path: Path) -> None:
    whole = fit(module(Quantised))
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1)
    fit(module(Quantised), callbacks=[saves], enable_checkpointing=True, max_epochs=1)
    path = next(tmp_path.glob("*step=5*.ckpt"))
    with pytest.warns(UserWarning, match="states of callbacks that are missing"):
        resumed = fit(module(Quantised), path)
    assert_equal(whole, resumed)
    assert_equal(*(each.trainer.optimizers[0].state_dict()["state"] for each in (whole, resumed)))


def test_a_state_of_the_usual_dtype_follows_its_parameter(tmp_path: Path) -> None:
    """A run that continues in another precision has its states in that precision, as in torch."""
    saves = ModelCheckpoint(tmp_path, save_last=True)
    fit(module(SGD), callbacks=[saves], enable_checkpointing=True, max_epochs=1, precision="bf16-true")
    with pytest.warns(UserWarning, match="states of callbacks that are missing"):
        resumed = fit(module(SGD), tmp_path / "last.ckpt", precision="32-true")
    for state in resumed.trainer.optimizers[0].state.values():
        assert state["momentum_buffer"].dtype is torch.float32


def test_memory_of_low_bit_states_is_counted_to_the_byte() -> None:
    states, parameters = {}, 2 + 1
    for kind in (SGD, Quantised):
        memory = MemoryLogger(detail="modules", leaks=False)
        fit(module(kind), callbacks=[memory], max_steps=3)
        states[kind] = memory.compositions[0].totals()["optimizer state"]
    assert states == {SGD: 4 * parameters, Quantised: parameters + 2 * 2}
