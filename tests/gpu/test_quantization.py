"""Weights in few bits and products in float8 on a GPU, which has kernels of its own for them. Not run on a GPU yet."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from equipoise import Float8Training, Quantization, Trainer
from equipoise.extensions.quantization.quantized_linear import quantized_layers
from tests.gpu.runs import GPU, QUIET

pytestmark = pytest.mark.not_simulated("no kernels of bitsandbytes and torchao")

PACKAGES = {"nf4": "bitsandbytes", "fp4": "bitsandbytes", "int8": "torchao"}


class Adapted(LightningModule):
    """Two layers with adapters of rank 4.

    Args:
        is_frozen: Whether adapters alone are trained.
    """

    def __init__(self, *, is_frozen: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 64)]).requires_grad_(not is_frozen)
        self.down = nn.ModuleList([nn.Linear(64, 4), nn.Linear(128, 4)])
        self.up = nn.ModuleList([nn.Linear(4, 128), nn.Linear(4, 64)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (features,) = batch
        hidden = features.to(self.down[0].weight.dtype)
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            hidden = torch.tanh(base(hidden) + up(down(hidden)))
        return (hidden - 0.5).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=0.01)


def fit(module: Adapted, callbacks: list[Any], precision: Any) -> Adapted:
    samples = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    options: Any = {**QUIET, "max_epochs": 1, "devices": [GPU], "strategy": "single_device"}
    trainer = Trainer(callbacks=callbacks, precision=precision, **options)
    trainer.fit(module, DataLoader(TensorDataset(samples), batch_size=16))
    return module


def stored(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().clone() for name, p in module.named_parameters() if not p.requires_grad}


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((p.cpu() - q.cpu()).abs().max()) for p, q in pairs if p.requires_grad)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("kind", PACKAGES)
def test_adapters_are_those_at_the_stored_values(kind: Any, precision: Any) -> None:
    pytest.importorskip(PACKAGES[kind])
    module = fit(Adapted(), [Quantization(kind)], precision)
    before = stored(module)
    plain = Adapted()
    for name, layer in quantized_layers(module).items():
        plain.get_submodule(name).weight.data = layer.values().cpu()  # type: ignore[union-attr]
    fit(plain, [], precision)
    Quantization.dequantize(module)
    assert difference(module, plain) < (1e-5 if precision == "32-true" else 0.05)
    again = fit(Adapted(), [Quantization(kind)], precision)
    fit(again, [Quantization(kind)], precision)
    assert all(torch.equal(value, before[name]) for name, value in stored(again).items() if "weight" in name)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_is_near_bfloat16(recipe: Any) -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability(GPU) < (8, 9):
        pytest.skip("needs compute capability 8.9")
    plain = fit(Adapted(is_frozen=False), [], "bf16-true")
    float8 = fit(Adapted(is_frozen=False), [Float8Training(recipe)], "bf16-true")
    emulated = fit(Adapted(is_frozen=False), [Float8Training(recipe, emulate=True)], "bf16-true")
    assert 0 < difference(float8, plain) < 0.1
    if recipe == "tensorwise":
        assert difference(float8, fit(Adapted(is_frozen=False), [], "fp8-true")) == 0
    assert difference(float8, emulated) < 0.1
