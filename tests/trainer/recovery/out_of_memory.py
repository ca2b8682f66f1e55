"""Errors of memory that are injected into steps, and callbacks that decide about them."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from equipoise import Callback, Trainer
from tests.support.batches import SIZES, Batches
from tests.support.trainer_runs import trainer

__all__ = ["PHASES", "Answers", "OutOfMemory", "fit", "run_out"]

PHASES = ["forward", "late", "backward"]


def run_out(*arguments: Any) -> None:
    """Raise the error of an allocator; also as a hook."""
    raise torch.OutOfMemoryError("injected")


class OutOfMemory:
    """Injects errors into training steps.

    Args:
        most: More samples than this do not fit.
        failing: Calls of the step that fail unless they have a single sample, counted from 0.
        phase: Where: "forward", "late" (all of forward was done) or "backward".

    Attributes:
        sizes: The samples of each call that did not fail.
    """

    def __init__(self, most: int = 10**6, failing: tuple[int, ...] = (), phase: str = "forward") -> None:
        self.most, self.failing, self.phase, self.calls = most, failing, phase, 0
        self.sizes: list[int] = []

    def wrap(self, module: Any) -> Any:
        step = module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            size = len(batch["features"])
            fails = size > self.most or (size > 1 and self.calls in self.failing)
            self.calls += 1
            if fails and self.phase == "forward":
                raise torch.OutOfMemoryError(f"injected for {size} samples")
            out = step(batch, batch_idx)
            if fails and self.phase == "late":
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory")
            if fails:
                loss = out if isinstance(out, Tensor) else out["loss"]
                loss.register_hook(run_out)
            else:
                self.sizes.append(size)
            return out

        module.training_step = training_step
        return module


class Answers(Callback):
    """Answers with the next of some values, and with the last one from then on.

    Attributes:
        events: What it was asked about.
    """

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.events: list[Any] = []

    def on_out_of_memory(self, trainer: Any, pl_module: Any, event: Any) -> Any:
        self.events.append(event)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def fit(module: Any, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> Trainer:
    """Train in float64 for two epochs; return the trainer."""
    run: Trainer = trainer(callbacks=list(callbacks), **{"precision": "64-true", "max_epochs": 2, **options})
    run.fit(module, DataLoader(Batches(SIZES), batch_size=None), ckpt_path=ckpt_path)
    return run
