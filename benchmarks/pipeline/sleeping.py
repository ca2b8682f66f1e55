"""Networks whose layers take a known time and nothing else, on devices of known speed.

On a busy machine a sleeping process wakes up late. So one device alone is timed before every step, and steps stand
beside it.
"""

import threading
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import PipelineStrategy, Trainer

__all__ = ["Sleeper", "Times", "step_seconds"]


class Times(NamedTuple):
    """Medians of steps.

    Attributes:
        seconds: Of a whole step.
        lost: The share of it in which one device alone would not have been at work.
    """

    seconds: float
    lost: float


class _Sleep(torch.autograd.Function):
    """Sleeps forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: "Layer", forward: float, backward: float) -> Tensor:
        ctx.layer, ctx.seconds = layer, backward
        layer.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.layer.sleep(ctx.seconds)
        return gradients[0], None, None, None


class Layer(nn.Module):
    """A layer that sleeps so long for a micro-batch, and longer on a slow device; half of a backward for its weight.

    Args:
        forward, backward: Seconds on a device of slowness 1.
        slowness: For each device how many times longer everything takes there.
    """

    def __init__(self, forward: float, backward: float, slowness: Sequence[float]) -> None:
        super().__init__()
        self.forward_seconds, self.backward_seconds, self.slowness = forward, backward, list(slowness)
        self.weight = nn.Parameter(torch.ones(2))

    def sleep(self, seconds: float) -> None:
        """A device is known by its thread; the last, where measuring is done as well, has no thread of its own."""
        name = threading.current_thread().name
        device = int(name.rsplit("-", 1)[1]) if name.startswith("equipoise-stage-") else -1
        time.sleep(seconds * self.slowness[device])

    def forward(self, x: Tensor) -> Tensor:
        half = self.backward_seconds / 2
        weight = _Sleep.apply(self.weight, self, 0.0, half)
        return _Sleep.apply(x * weight, self, self.forward_seconds, half)


class Sleeper(L.LightningModule):
    """Layers one after another.

    Args:
        layers: Their number.
        forward, backward: Seconds of each for a micro-batch.
        slowness: For each device how many times longer everything takes there.
    """

    def __init__(self, layers: int, forward: float, backward: float, slowness: Sequence[float]) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Layer(forward, backward, slowness) for _ in range(layers)))
        self.seconds: list[float] = []
        self.alone: list[float] = []
        self.devices = len(slowness)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch.requires_grad_()).square().mean()  # so the first stage runs backward like all others

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note the time of one device's layers for all micro-batches if nothing else is to be done."""
        begin = time.perf_counter()
        for _ in range(len(batch)):
            x = batch[:1].requires_grad_()
            for _ in range(len(self.net) // self.devices):
                x = self.net[-1](x)  # all layers take the same time, and the last is always in this process
            x.sum().backward()
        self.net[-1].zero_grad()
        self.alone.append(time.perf_counter() - begin)
        # Replicas begin the step together.
        self.trainer.strategy.barrier()
        self.began = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def step_seconds(module: Sleeper, strategy: PipelineStrategy, devices: int, micro_batches: int, steps: int) -> Times:
    """Time whole steps of the trainer; the first one, in which the network is cut, is left out.

    Args:
        module: The module, for the devices of one replica.
        strategy: The strategy. Each of its replicas has a batch in every step.
        devices: Number of devices of all replicas.
        micro_batches: Number of micro-batches of a batch.
        steps: Number of steps that count.
    """
    batches = [torch.ones(micro_batches, 2) for _ in range((steps + 1) * strategy.replicas)]
    data = DataLoader(batches, batch_size=None)
    trainer = Trainer(
        strategy=strategy,
        devices=["cpu"] * devices,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    seconds, alone = module.seconds[1:], module.alone[1:]
    lost = median(1 - one / step for one, step in zip(alone, seconds, strict=True))
    return Times(median(seconds), lost)
