"""Modules that are cut into stages, and how they are trained, for the tests of the pipeline."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from equipoise import PipelineStrategy, Trainer
from equipoise.extensions.pipeline.schedule.schedule import Schedule, actions_of
from equipoise.precision import Precision
from equipoise.tree import tensors_in
from tests.support.batches import SIZES, VOCABULARY
from tests.support.equality import assert_equal
from tests.support.networks.transparency import Base
from tests.support.one_device import Run, assert_same_run, on_one_device, train
from tests.support.quiet import QUIET

__all__ = [
    "Copying",
    "EachStep",
    "Network",
    "Tokens",
    "assert_as_on_one_device",
    "assert_same",
    "assert_timeline",
    "fit",
    "pipelined",
    "processes",
    "quiet",
    "stay_whole",
]


def stay_whole(value: Any) -> None:
    """Ask for a value of what a module receives. What else it does, such as counting its calls, is then not lost."""
    for tensor in tensors_in(value):
        float(tensor.detach().sum())


def quiet(**options: Any) -> Trainer:
    """A trainer that writes nothing."""
    return Trainer(**{"accelerator": "cpu", **QUIET, "max_epochs": 1, "precision": "64-true", **options})


class Copying(PipelineStrategy):
    """Stages have copies of tied layers as if all devices were different ones."""

    def setup(self, module: nn.Module, precision: Precision) -> None:
        super().setup(module, precision)
        self._run.network.placement._are_apart = lambda stage, other: True


class Network(nn.Module):
    """Tied weights, a skip connection, tuples and dictionaries between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.norm = nn.LayerNorm(6)
        self.output = nn.Linear(6, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight
        self.relu = nn.ReLU(inplace=True)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.embedding(tokens)
        skipped = hidden
        for block in self.blocks:
            made = {"both": (block(hidden), scale), "size": tokens.size(1)}
            hidden = hidden + torch.tanh(made["both"][0]) * made["both"][1] / made["size"]
        if mask is not None:
            hidden = hidden * mask.unsqueeze(-1)
        return {"logits": self.output(self.relu(self.norm(hidden)) + skipped), "hidden": hidden}


class Tokens(Base):
    """Predicts tokens; the mean over those that are not masked.

    Args:
        by_self: Whether `training_step` calls the module rather than its child.
    """

    def __init__(self, by_self: bool = False) -> None:
        super().__init__()
        self.net, self.by_self = Network(), by_self
        self.register_buffer("smoothing", torch.tensor(0.1))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Any:
        return self.net(tokens, mask=mask, scale=0.5)["logits"]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        tokens, mask = batch["tokens"][:, :-1], batch["mask"][:, 1:]
        logits = self(tokens, mask[:, :]) if self.by_self else self.net(tokens, mask, scale=0.5)["logits"]
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten(), reduction="none")
        loss = (losses * mask.flatten()).sum() / mask.sum().clamp(min=1)
        self.log("loss", loss, on_step=True, on_epoch=True)
        right = (logits.argmax(-1) == batch["tokens"][:, 1:]) * mask
        self.log("right", right.sum() / mask.sum().clamp(min=1), on_epoch=True)
        self.log("most", losses.max(), reduce_fx="max", on_epoch=True)
        return {"loss": loss, "loss_weight": mask.sum()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch["tokens"])
        self.log("val_loss", nn.functional.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten()))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch["tokens"])


def pipelined(stages: int, strategy: type[PipelineStrategy] = PipelineStrategy, **options: Any) -> dict[str, Any]:
    """Arguments of a trainer."""
    return {"strategy": strategy(**options), "devices": ["cpu"] * stages}


def processes(stages: int, **options: Any) -> dict[str, Any]:
    """Arguments of a trainer whose stages have processes of their own."""
    return pipelined(stages, **{"engine": "processes", "timeout": 300.0, **options})


def fit(
    make: Callable[[], Any],
    sizes: Sequence[int] = SIZES,
    *,
    strategy: Any = "single_device",
    devices: Sequence[str] = ("cpu",),
    reads_gradients: bool = True,
    **options: Any,
) -> Run:
    """Train on ready batches as `one_device.train` does; gradients are kept that lie in this process."""
    reads = reads_gradients and getattr(strategy, "engine", "threads") == "threads"
    return train(make, strategy, devices, sizes, reads_gradients=reads, **options)  # type: ignore[arg-type]


def assert_same(expected: Run, actual: Run, tolerance: float = 1e-12) -> None:
    """Assert that gradients, where both runs kept some, weights, states of optimisers and logged values are equal."""
    if not (expected.gradients and actual.gradients):
        expected, actual = expected._replace(gradients=[]), actual._replace(gradients=[])
    assert_same_run(expected, actual, tolerance)
    states = [[each.state_dict() for each in run.trainer.optimizers] for run in (expected, actual)]
    assert_equal(*states, tolerance, title="States of optimisers")


def assert_as_on_one_device(
    make: Callable[[], Any], plan: dict[str, Any], tolerance: float = 1e-12, **options: Any
) -> Run:
    """Train in stages, compare with a run on one device, and return the run.

    Args:
        make: Makes the module.
        plan: Arguments of the trainer of stages, such as `pipelined(2)`.
        tolerance: See `assert_equal`. Default: 1e-12.
        options: Hashable arguments of both runs, such as `sizes=(4, 2)`.
    """
    run = fit(make, **plan, **options)
    assert_same(on_one_device(make, **options), run, tolerance)
    return run


def assert_timeline(timeline: Any, schedule: Schedule, devices: int, micro_batches: int, each: int) -> None:
    """Assert that a step has computed what a schedule says, with as many stages on each device."""
    assert (timeline.devices, timeline.stages) == (devices, devices * each)
    for device in range(devices):
        own = [(span.stage, span.action) for span in timeline.spans if span.stage % devices == device]
        assert own == actions_of(schedule, device, devices, micro_batches, each)


class EachStep(L.Callback):
    """Writes `step=N.ckpt` after each batch, so within a window if one has begun."""

    fires_without_batch = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")
