"""Loops that are measured beside the hand-written one."""

import argparse
import gc
import json
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise import Trainer

sys.path.append(str(Path(__file__).parents[1] / "overhead"))

import by_hand
from frameworks import LOG_EVERY, frameworks, quiet_trainer
from turns import Batches, Turns
from workload import Batch, Classifier, loader_of

__all__ = ["CONTROL", "LOGGED", "LOOPS", "measure_rows", "slow_down"]

CONTROL, LOGGED = "control", "logged value"
LOGGED_VALUES = 2  # in each step of the load "logs"
EPOCH = 5
PROCESSES = 2


class Loop(NamedTuple):
    """A loop, and how its steps are counted.

    Attributes:
        run: Takes all steps, and returns the turns with their times.
        turns: Returns new turns.
        period: Number of steps after which work returns that not every step has. Default: 1.
    """

    run: Callable[[Turns], Turns]
    turns: Callable[[int], Turns] = Turns
    period: int = 1


def measure(name: str, steps: int) -> float:
    """Return the time of a step over that of the hand-written loop.

    Args:
        name: Name of a loop.
        steps: Number of steps of each loop.
    """
    loop = LOOPS[name]
    # As in benchmarks/overhead: no loop pays for objects of others.
    gc.collect()
    gc.freeze()
    return loop.run(loop.turns(steps)).ratio(loop.period)


def _control(turns: Turns) -> Turns:
    by_hand.train(turns.data)
    return turns


def _trainer(turns: Turns, load: str) -> Turns:
    frameworks(["equipoise"])["Equipoise"][load](turns.data)
    return turns


def _short_epochs(turns: Turns) -> Turns:
    quiet_trainer(Trainer, max_epochs=turns.epochs).fit(Classifier(), loader_of(turns.data))
    return turns


class _TakingTurns(Classifier):
    """Network whose steps take turns with the hand-written loop, wherever the trainer reads its batches.

    Args:
        turns: The turns. They come back with the module from the process in which the times were read.
    """

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self.turns = turns

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.turns.take()
        return super().training_step(batch, batch_idx)


def _ddp(turns: Turns) -> Turns:
    module = _TakingTurns(turns)
    trainer: Any = quiet_trainer(Trainer, strategy="ddp", devices=["cpu"] * PROCESSES)
    trainer.fit(module, loader_of(Batches(turns.batch, PROCESSES * turns.epoch)))
    return module.turns


LOOPS = {
    CONTROL: Loop(_control),
    "bare step": Loop(partial(_trainer, load="bare")),
    "logging step": Loop(partial(_trainer, load="logs")),
    "full step": Loop(partial(_trainer, load="full"), period=LOG_EVERY),
    "epoch of five batches": Loop(_short_epochs, partial(Turns, epoch=EPOCH), period=EPOCH),
    "ddp step": Loop(_ddp, partial(Turns, is_distributed=True)),
}


def slow_down(microseconds: float) -> None:
    """Plant a slowdown of each step of the trainer in this process."""
    training_step = Classifier.training_step

    def slower(self: Classifier, batch: Batch, batch_idx: int) -> Tensor:
        end = process_time() + 1e-6 * microseconds
        while process_time() < end:
            pass
        return training_step(self, batch, batch_idx)

    Classifier.training_step = slower  # type: ignore[method-assign]


def measure_rows(names: Sequence[str], steps: int) -> dict[str, float]:
    """Return the ratio of each row. That of a logged value is half of what two cost."""
    ratios = {}
    for name in names:
        if name == LOGGED:
            cost = measure("logging step", steps) - measure("bare step", steps)
            ratios[name] = cost / LOGGED_VALUES
        else:
            ratios[name] = measure(name, steps)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="+", choices=[*LOOPS, LOGGED])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--planted", type=float, required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning", "equipoise"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if options.planted:
        slow_down(options.planted)
    print(json.dumps(measure_rows(options.rows, options.steps)))


if __name__ == "__main__":
    main()
