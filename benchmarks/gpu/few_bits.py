"""Item 13: steps with frozen weights in few bits, and with products in float8, beside those in bfloat16."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.gpu.campaign import Row
from benchmarks.gpu.measuring import Setting, TimedBatches
from benchmarks.gpu.networks import Task, Training, adam
from benchmarks.gpu.steps import Run, fit, quiet, times
from equipoise import Callback, Float8Training, Quantization, Trainer

__all__ = ["few_bits"]

PRECISION = "bf16-true"
CAPABILITY = (8, 9)
"""The first compute capability with products in float8."""
MOST_BYTES = {"nf4": 0.30, "fp4": 0.30, "int8": 0.55}
"""Bytes of the stored weights, by those in bfloat16."""


class Adapted(nn.Module):
    """Layers, each with an adapter of rank 8.

    Args:
        width: The width.
        layers: The number of layers.
        is_frozen: Whether adapters alone are trained.
    """

    def __init__(self, width: int, layers: int, *, is_frozen: bool) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.base.requires_grad_(not is_frozen)
        self.down = nn.ModuleList(nn.Linear(width, 8, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(8, width, bias=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, features: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            features = features + torch.tanh(base(self.norm(features)) + up(down(features)))
        return features


def task_of(setting: Setting, *, is_frozen: bool) -> Task:
    """Return four layers of 4096, with 4096 samples."""
    width = setting.pick(4096, 256)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Adapted(width, 4, is_frozen=is_frozen)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(number)
        return torch.randn(width, width, generator=draw).bfloat16(), torch.randint(width, (width,), generator=draw)

    return Task("frozen layers" if is_frozen else "layers", make, batch, PRECISION)


def few_bits(setting: Setting) -> Iterator[Row]:
    """Compare steps by the callbacks with those without."""
    quiet()
    missing = [package for package in ("bitsandbytes", "torchao") if find_spec(package) is None]
    if missing or setting.is_simulated:
        yield Row("weights of few bits", f"needs {', '.join(missing) or 'kernels that simulated devices lack'}")
        return
    kinds: dict[str, Callback] = {kind: Quantization(kind) for kind in MOST_BYTES}  # type: ignore[arg-type]
    yield from compared(task_of(setting, is_frozen=True), kinds, setting)
    yield from memory_of(task_of(setting, is_frozen=True), setting)
    is_able = setting.has_cuda and torch.cuda.get_device_capability() >= CAPABILITY
    recipes: dict[str, Callback] = {
        "float8, tensorwise": Float8Training("tensorwise", emulate=not is_able),
        "float8, rowwise": Float8Training("rowwise", emulate=not is_able),
    }
    yield from compared(task_of(setting, is_frozen=False), recipes, setting)


def compared(task: Task, callbacks: dict[str, Callback], setting: Setting) -> Iterator[Row]:
    """Yield the times of a step by that in bfloat16."""
    runs: dict[str, Run] = {PRECISION: partial(train, task, setting, [])}
    for name, callback in callbacks.items():
        runs[name] = partial(train, task, setting, [callback])
    measured = times(task, runs, setting, steps=setting.pick(20, 2), rounds=setting.pick(3, 1))
    plain = median(one.time for one in measured[PRECISION])
    yield Row.time(f"{task.name}, {PRECISION}: time of a step", plain, "µs")
    for name in callbacks:
        ratio = median(one.time for one in measured[name]) / plain
        yield Row.time(f"{task.name}, {name}: time by that in {PRECISION}", ratio, "")


def train(task: Task, setting: Setting, callbacks: list[Callback], data: TimedBatches) -> None:
    """Train with callbacks."""
    fit(Trainer, Training(task, adam), data.loader(), setting, precision=PRECISION, callbacks=callbacks)


def memory_of(task: Task, setting: Setting) -> Iterator[Row]:
    """Yield the bytes of stored weights, by those in bfloat16."""
    module = Training(task)
    whole = sum(2 * parameter.numel() for parameter in module.parameters() if not parameter.requires_grad)
    for kind, most in MOST_BYTES.items():
        module = Training(task)
        batches = DataLoader(task.batches(1, torch.device("cpu")), batch_size=None)  # type: ignore[arg-type]
        callbacks: Any = [Quantization(kind)]  # type: ignore[arg-type]
        fit(Trainer, module, batches, setting, precision=PRECISION, callbacks=callbacks)
        stored = sum(parameter.nbytes for parameter in module.parameters() if not parameter.requires_grad)
        yield Row.at_most(f"{kind}: bytes of the frozen weights by those in bfloat16", stored / whole, most)
