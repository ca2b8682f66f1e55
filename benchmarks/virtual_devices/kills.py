"""Does a run that is killed, and continues on another number of devices after each kill, end with the same bits?"""

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kills.processes import KillInStep, attempt
from benchmarks.virtual_devices.main import differences
from benchmarks.virtual_devices.programs import Program, draw, fit, on_one_device, results

EPOCHS = 2
# Seconds for each run.
LIMIT = 400.0
# The most calls of Python functions from the beginning of the chosen batch to the kill. A batch takes thousands.
CALLS = 12000
COLUMNS = (
    "programs",
    "kills",
    "of these of all processes",
    "continued within an epoch",
    "of these within a window",
    "begun anew",
    "equal to the bit",
    "different",
    "failed",
)


@dataclass(frozen=True)
class Plan:
    """The runs of a program.

    Attributes:
        devices: The number of devices of each run. All but the last one are killed.
        one_process: Whether the devices of each run belong to one process.
        every: From one checkpoint to the next, in batches or optimiser steps.
        by_hand: Whether a callback of the user saves after batches, instead of `ModelCheckpoint` after steps.
        is_asynchronous: Whether a thread writes the checkpoints.
    """

    devices: tuple[int, ...]
    one_process: tuple[bool, ...]
    every: int
    by_hand: bool
    is_asynchronous: bool


def plan(seed: int) -> Plan:
    """Return what happens to the program of a number."""
    choice = Random(f"kills {seed}")
    devices = [choice.choice((1, 2, 3, 4))]
    for _ in range(choice.choice((2, 3, 4))):
        others = [number for number in (1, 2, 3, 4) if number != devices[-1]]
        devices.append(choice.choice(others))
    return Plan(
        devices=tuple(devices),
        one_process=tuple(choice.random() < 0.2 for _ in devices),
        every=choice.choice((1, 1, 2)),
        by_hand=choice.random() < 0.5,
        is_asynchronous=choice.random() < 0.5,
    )


class SaveOften(L.Callback):
    """Saves a checkpoint after every few batches, also within a window.

    Args:
        every: From one checkpoint to the next, in batches.
        path: The path of the checkpoint, which the next one replaces.
    """

    def __init__(self, every: int, path: Path) -> None:
        self.every = every
        self.path = path

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        """Save."""
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready % self.every == 0:
            trainer.save_checkpoint(self.path)


def _run(program: Program, planned: Plan, folder: Path, place: tuple[int, bool], kill: KillInStep) -> None:
    """Train, from the newest checkpoint if there is one, and keep what must be equal."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    best = ModelCheckpoint(folder, monitor="val_loss", filename="best-{epoch}")
    path: Path | str | None = "last"
    saving: Any = ModelCheckpoint(folder / "steps", every_n_train_steps=planned.every, save_last=True)
    if planned.by_hand:
        saving = SaveOften(planned.every, folder / "steps" / "last.ckpt")
        path = _newest(folder)
    options = {"plugins": [AsyncCheckpointIO()]} if planned.is_asynchronous else {}
    trainer = fit(program, *place, path, [best, saving, kill], **options)
    torch.save(results(trainer, best), folder / "results.pt")


def _newest(folder: Path) -> Path | None:
    paths = sorted((folder / "steps").glob("last*.ckpt"), key=lambda path: path.stat().st_mtime)
    return paths[-1] if paths else None


def _results(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "results.pt", weights_only=False)  # written a moment ago
    return found


def undisturbed(program: Program, planned: Plan, folder: Path) -> dict[str, Any]:
    """Train in one process, and return what must be equal."""
    folder.mkdir(parents=True)
    plain = on_one_device(program)
    if not attempt(lambda: _run(plain, planned, folder, (1, False), KillInStep(None)), folder, LIMIT):
        raise AssertionError("the undisturbed run was killed")
    return _results(folder)


def killed(program: Program, planned: Plan, folder: Path, counts: Counter[str]) -> dict[str, Any]:
    """Train with a kill in each run of a plan but the last, and return what must be equal.

    Args:
        program: The program.
        planned: The plan.
        folder: Where its files go.
        counts: What happens is added to these.
    """
    folder.mkdir(parents=True)
    choice = Random(f"moments {program.seed}")
    batches = EPOCHS * -(-program.samples // program.batch_size)
    kills = len(planned.devices) - 1
    for number, place in enumerate(zip(planned.devices, planned.one_process, strict=True)):
        if number:
            _note(program, folder, counts)
        batch = None
        if number < kills:
            batch = int(batches * (number + choice.uniform(0.2, 0.9)) / kills)
        calls = choice.randrange(CALLS)
        devices, one_process = place
        rank = 0 if one_process else choice.randrange(devices)
        of_all = choice.random() < 0.7

        def run(
            place: tuple[int, bool] = place,
            moment: tuple[int | None, int, int] = (batch, calls, rank),
            of_all: bool = of_all,
        ) -> None:
            # The caller, all ranks, and the workers of their loaders; or one rank.
            victim = os.getpid() if of_all else None
            _run(program, planned, folder, place, KillInStep(*moment, victim, with_children=of_all))

        if attempt(run, folder, LIMIT):
            break  # it came to its end
        counts["kills"] += 1
        counts["of these of all processes"] += of_all
    return _results(folder)


def _note(program: Program, folder: Path, counts: Counter[str]) -> None:
    """Count from where a run continues."""
    path = _newest(folder)
    if path is None:
        counts["begun anew"] += 1
        return
    content = torch.load(path, weights_only=False)  # written a moment ago
    done = content["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"]
    if 0 < done < -(-program.samples // program.batch_size):
        counts["continued within an epoch"] += 1
        counts["of these within a window"] += done % program.window > 0


def main() -> int:
    """Run programs until there were enough kills, and print the table. Return 1 if a program was not equal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kills", type=int, default=50, help="begin no program after so many kills")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no program after so many seconds")
    parser.add_argument("--keep", action="store_true", help="keep the files of programs that are not equal")
    options = parser.parse_args()
    begin = time.perf_counter()
    root = Path(tempfile.mkdtemp(prefix="virtual-kills-"))
    counts: Counter[str] = Counter()
    seed = options.first
    while counts["kills"] < options.kills and time.perf_counter() - begin < options.seconds:
        program, planned = draw(seed), plan(seed)
        folder = root / f"{seed}"
        outcome, different = "failed", []
        try:
            expected = undisturbed(program, planned, folder / "undisturbed")
            different = differences(killed(program, planned, folder / "killed", counts), expected)
            outcome = "different" if different else "equal to the bit"
        except AssertionError as error:
            different = [str(error)[-3000:]]
        counts["programs"] += 1
        counts[outcome] += 1
        print(f"{seed} {program.network}, {planned}: {outcome}, {counts['kills']} kills so far", flush=True)
        if different:
            print(program, *different, sep="\n    ", flush=True)
        if not (different and options.keep):
            shutil.rmtree(folder, ignore_errors=True)
        seed += 1
    if not any(root.iterdir()):
        root.rmdir()
    print("|", " | ".join((*COLUMNS, "seconds")), "|\n|", " | ".join(["---"] * (len(COLUMNS) + 1)), "|")
    print("|", " | ".join(str(counts[name]) for name in COLUMNS), f"| {time.perf_counter() - begin:.0f} |")
    return int(counts["equal to the bit"] < counts["programs"])


if __name__ == "__main__":
    sys.exit(main())
