"""Kills programs that keep state set in hooks at random places, resumes them, and compares them to the bit.

python benchmarks/resumed_epochs/main.py                       all programs, two kills each
python benchmarks/resumed_epochs/main.py --seed 7 --only Anchor
"""

import argparse
import os
import signal
import sys
import tempfile
import warnings
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from programs import PROGRAMS
from rich.console import Console
from rich.table import Table

from equipoise import Trainer

__all__ = ["check", "main"]

EPOCHS, BATCHES = 3, 7
HOOKS = ("on_train_batch_start", "on_before_optimizer_step", "on_train_batch_end", "on_validation_start")


class Kill(L.Callback):
    """Kills this process in a hook, once its training has come to a batch.

    Args:
        hook: The name of the hook; None: never.
        batch: The number of the batch in the run, from 0.
    """

    def __init__(self, hook: str | None, batch: int) -> None:
        def kill(trainer: Any, *arguments: Any) -> None:
            if not trainer.sanity_checking and trainer.current_epoch * BATCHES + trainer.fit_loop.batch_idx >= batch:
                os.kill(os.getpid(), signal.SIGKILL)

        if hook is not None:
            setattr(self, hook, kill)


class Values(L.Callback):
    """Keeps the logged values of each epoch."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append({name: value.clone() for name, value in trainer.callback_metrics.items()})


def train(name: str, folder: Path, every: int, kill: Kill) -> None:
    """Trains a program, from its last checkpoint if there is one, and writes how it ended."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    L.seed_everything(3, verbose=False)
    module = PROGRAMS[name]()
    values = Values()
    saves = ModelCheckpoint(folder, every_n_train_steps=every, save_last=True)
    trainer = Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[*module.callbacks_of_it(), values, saves, kill], precision="64-true",
        val_check_interval=3,
    )  # fmt: skip
    last = folder / "last.ckpt"
    trainer.fit(module, **module.loaders(), ckpt_path=last if last.exists() else None)
    end = {
        "weights": module.state_dict(),
        "values": values.epochs,
        "kept": module.kept(),
        "optimiser": trainer.optimizers[0].state_dict(),
        "steps": trainer.global_step,
    }
    torch.save(end, folder / "end.pt")


def check(name: str, seed: int, folder: Path, kills: int = 2) -> str:
    """Runs a program undisturbed, then killed and resumed; returns where it was killed, and what was wrong."""
    choose = Random(f"{name} {seed}")
    every = choose.choice([1, 2, 3])
    ends = []
    places = []
    batches = sorted(choose.sample(range(2, EPOCHS * BATCHES - 1), kills))
    planned = [(choose.choice(HOOKS), batch) for batch in batches]
    for part, plan in (("whole", []), ("killed", planned)):
        place = folder / part
        place.mkdir(parents=True)
        for hook, batch in [*plan, (None, 0)]:
            child = get_context("fork").Process(target=train, args=(name, place, every, Kill(hook, batch)))
            child.start()
            child.join()
            assert child.exitcode in (0, -signal.SIGKILL), f"{name}: exit code {child.exitcode}"
            if child.exitcode:
                places.append(f"{hook} of batch {batch}")
        ends.append(torch.load(place / "end.pt", weights_only=False))
    difference = difference_of(*ends)
    return f"killed in {', '.join(places)}; a file after {every} steps: {difference or 'equal'}"


def difference_of(expected: Any, actual: Any, place: str = "") -> str:
    """Returns the first place where two nested values differ; empty if there is none."""
    if isinstance(expected, torch.Tensor):
        return "" if torch.equal(expected, actual) else f"{place}: {actual} for {expected}"
    if isinstance(expected, dict) and expected.keys() == actual.keys():
        found = (difference_of(value, actual[key], f"{place}/{key}") for key, value in expected.items())
    elif isinstance(expected, (list, tuple)) and len(expected) == len(actual):
        pairs = zip(expected, actual, strict=True)
        found = (difference_of(one, other, f"{place}/{index}") for index, (one, other) in enumerate(pairs))
    else:
        return "" if expected == actual else f"{place}: {actual} for {expected}"
    return next(filter(None, found), "")


def main(arguments: list[str] | None = None) -> int:
    """Runs the programs, prints a table, and returns the exit code: 1 if a program ended otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    chosen = parser.parse_args(arguments)
    table = Table("program", f"seed {chosen.seed}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen.only:
            result = check(name, chosen.seed, Path(folder) / name)
            failed += not result.endswith(": equal")
            table.add_row(name, result)
    console = Console()
    console.print(table)
    console.print(f"seed {chosen.seed}: {len(chosen.only) - failed} of {len(chosen.only)} equal to the bit")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
