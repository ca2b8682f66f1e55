"""Kills random training programs at random moments, and resumes each with another number of processes.

python benchmarks/kills/elastic.py                      24 programs
python benchmarks/kills/elastic.py --first 17 --cases 1 one program again, by its number
"""

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from processes import KillInStep, attempt
from programs import Case, draw, train
from rich.console import Console
from rich.table import Table

from equipoise import DDPStrategy

__all__ = ["main"]

TOLERANCE = 1e-12
LIMIT = 400.0
CHANGES = 3
# A step of a process makes so many calls of Python functions, or half as many.
CALLS = 3000
COLUMNS = (
    "programs",
    "kills",
    "changes of the number of processes",
    "resumed in mid-epoch",
    "of these in mid-window",
    "programs with three changes",
    "equal within 1e-12",
    "failed",
)


def draw_elastic(seed: int) -> Case:
    """A program whose steps do not depend on how they are computed: no dropout, no distortion, in float64."""
    choose = Random(f"elastic {seed}")
    # Lightning writes a checkpoint at the first validation behind a step. With a validation after every second batch
    # and three batches in a window, that is within a window as often as between two.
    accumulate, validation, every_n_steps = choose.choice(
        [(3, 2, None), (3, 2, None), (2, 1, None), (1, 1, 1), (2, 1.0, 1), (3, 2, 2)]
    )
    return dataclasses.replace(
        draw(seed, "ddp"),
        samples=choose.randint(40, 70),
        batch_size=choose.choice([2, 3, 4]),
        epochs=2,
        max_steps=-1,
        dropout=0.0,
        accumulate=accumulate,
        validation=validation,
        every_n_steps=every_n_steps,
        early_stopping=None,
    )


def plan(seed: int) -> list[tuple[str, int]]:
    """Strategies and numbers of processes or devices, one after another; each number of processes is another one."""
    choose = Random(f"plan {seed}")
    planned: list[tuple[str, int]] = []
    before = 0
    for _ in range(CHANGES + 1):
        processes = choose.choice([count for count in (1, 2, 3, 4) if count != before])
        name = "ddp"
        if processes == 1:
            name = choose.choice(["single_device", "dp", "balanced", "ddp"])
        planned.append((name, processes))
        before = processes
    return planned


def strategy_of(name: str, processes: int) -> dict[str, Any]:
    """Return the arguments of the trainer."""
    if name == "ddp":
        return {"strategy": DDPStrategy(timeout=120), "devices": processes}
    if name == "single_device":
        return {"strategy": name}
    return {"strategy": name, "devices": ["cpu", "cpu"]}


# Runs


def undisturbed(case: Case, folder: Path, strategy: tuple[str, int]) -> dict[str, Any]:
    """Runs a program to its end, and returns what it returned."""
    folder.mkdir(parents=True)
    if not attempt(partial(_run, case, folder, strategy, KillInStep(None), resume=False), folder, LIMIT):
        raise AssertionError("the undisturbed run was killed")
    return _values(folder)


def killed_and_resumed(
    case: Case, folder: Path, planned: list[tuple[str, int]], counts: Counter[str]
) -> dict[str, Any]:
    """Runs a program that is killed in each part of a plan but the last, and resumed by the next.

    Args:
        case: The program.
        folder: Where its files go.
        planned: Strategies and numbers of processes.
        counts: What happened is added to these.
    """
    folder.mkdir(parents=True)
    choose = Random(f"kills {case.seed}")
    steps = case.epochs * -(-case.samples // (case.batch_size * planned[0][1]))
    changes = 0
    for number, strategy in enumerate(planned):
        if not _checkpoints(folder):
            # A program that has no checkpoint begins anew, and so with the processes with which it began.
            strategy = planned[0]
        processes = strategy[1]
        written_by = _note_checkpoint(folder, counts, processes)
        changes += written_by not in (None, processes)
        kills_caller = processes > 1 and choose.random() < 0.3
        # The first kill comes late enough for a checkpoint in most programs.
        step = int(steps * (number + 0.5 + 0.5 * choose.random()) / len(planned))
        calls, rank = choose.randrange(CALLS), choose.randrange(processes)

        def run(
            number: int = number,
            strategy: tuple[str, int] = strategy,
            kill: tuple[int, int, int] = (step, calls, rank),
            kills_caller: bool = kills_caller,
        ) -> None:
            killer = KillInStep(*kill, os.getpid() if kills_caller else None)
            if number == CHANGES:
                killer = KillInStep(None)
            _run(case, folder, strategy, killer, resume=number > 0)

        if attempt(run, folder, LIMIT):
            break  # it came to its end
        counts["kills"] += 1
    counts["changes of the number of processes"] += changes
    counts["programs with three changes"] += changes == CHANGES
    return _values(folder)


def _run(case: Case, folder: Path, strategy: tuple[str, int], kill: KillInStep, *, resume: bool) -> None:
    values = train(case, folder, kill, resume=resume, strategy=strategy_of(*strategy))
    torch.save(values, folder / "values.pt")


def _values(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = torch.load(folder / "values.pt", weights_only=False)  # written a moment ago
    return values


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints from which a program may continue; the last one is the latest."""
    return sorted((folder / "checkpoints").glob("last*.ckpt"), key=lambda path: path.stat().st_mtime)


def _note_checkpoint(folder: Path, counts: Counter[str], processes: int) -> int | None:
    """Counts where the checkpoint was written from which the next part continues; returns by how many processes."""
    files = _checkpoints(folder)
    if not files:
        return None
    content = torch.load(files[-1], weights_only=False)  # written by this program a moment ago
    entry = content["equipoise"]
    positions = entry.get("positions") or [entry["position"]]
    epoch = content["loops"]["fit_loop"]["epoch_progress"]["current"]
    if len(positions) != processes and epoch["started"] > epoch["processed"]:
        counts["resumed in mid-epoch"] += 1
        is_open = any(position["window"]["equal"] or position["window"]["others"] for position in positions)
        counts["of these in mid-window"] += is_open
    return len(positions)


# Comparison


def compare(case: Case, expected: dict[str, Any], actual: dict[str, Any], folders: tuple[Path, Path]) -> None:
    """Compares a run with the undisturbed one.

    Raises:
        AssertionError: Naming the first difference.
    """
    for name in ("weights", "optimizer", "steps", "metrics", "best"):
        _compare(expected[name], actual[name], name)
    steps, resumed = steps_of(folders[0], case), steps_of(folders[1], case)
    assert steps == resumed, "other samples in a step"


def _compare(expected: Any, actual: Any, place: str) -> None:
    if isinstance(expected, dict):
        assert expected.keys() == actual.keys(), f"{place}: other keys"
        for key in expected:
            if key not in ("loss", "loss_step"):  # that of rank 0 alone
                _compare(expected[key], actual[key], f"{place}/{key}")
        return
    if isinstance(expected, list | tuple):
        assert len(expected) == len(actual), f"{place}: {actual!r} for {expected!r}"
        for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
            _compare(one, other, f"{place}/{index}")
        return
    if isinstance(expected, torch.Tensor | float):
        one, other = torch.as_tensor(expected).double(), torch.as_tensor(actual).double()
        assert torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE), f"{place}: {actual!r} for {expected!r}"
        return
    assert expected == actual, f"{place}: {actual!r} for {expected!r}"


def steps_of(folder: Path, case: Case) -> dict[tuple[int, int], list[int]]:
    """The samples of each step, which are those of all processes; each sample counts once in an epoch.

    A step that was computed again, by another number of processes, must have had the same samples.
    """
    seen: dict[tuple[int, int], set[int]] = {}
    for path in sorted(folder.glob("seen-*.jsonl")):
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # a line that was cut off
                epoch, batch, indices = json.loads(line)
                seen.setdefault((epoch, batch), set()).update(indices[0])
    for epoch in range(case.epochs):
        drawn = Counter(index for (of, _), indices in seen.items() if of == epoch for index in indices)
        assert drawn == dict.fromkeys(range(case.samples), 1), f"epoch {epoch}: not every sample once"
    return {key: sorted(indices) for key, indices in seen.items()}


# The campaign


def run(seed: int, root: Path, counts: Counter[str], *, keep: bool) -> str:
    """Runs a program undisturbed, then killed and resumed; returns what was wrong, or nothing."""
    case, planned = draw_elastic(seed), plan(seed)
    folders = root / f"{seed}" / "undisturbed", root / f"{seed}" / "killed"
    counts["programs"] += 1
    wrong = ""
    try:
        expected = undisturbed(case, folders[0], planned[0])
        actual = killed_and_resumed(case, folders[1], planned, counts)
        compare(case, expected, actual, folders)
        counts["equal within 1e-12"] += 1
    except AssertionError as error:
        counts["failed"] += 1
        wrong = f"{planned}: {error}"
    if not (wrong and keep):
        shutil.rmtree(root / f"{seed}", ignore_errors=True)
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """Runs the campaign, prints a table, and returns the exit code: 1 if a program failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=24, help="number of programs")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no program after so many minutes")
    parser.add_argument("--keep", action="store_true", help="keep the files of programs that failed")
    chosen = parser.parse_args(arguments)
    begin = time.monotonic()
    console = Console()
    torch.set_num_threads(1)  # processes are forked, and threads do not survive that
    root = Path(tempfile.mkdtemp(prefix="elastic-"))
    counts: Counter[str] = Counter()
    for seed in range(chosen.first, chosen.first + chosen.cases):
        if time.monotonic() > begin + 60 * chosen.minutes:
            console.print(f"out of time before program {seed}")
            break
        wrong = run(seed, root, counts, keep=chosen.keep)
        if wrong:
            console.print(f"program {seed} failed: {wrong[-2000:]}", markup=False)
        else:
            console.print(f"program {seed}: {dict(counts)}, {time.monotonic() - begin:.0f} s", markup=False)
    if not chosen.keep:
        shutil.rmtree(root, ignore_errors=True)
    table = Table(*COLUMNS)
    table.add_row(*(str(counts[name]) for name in COLUMNS))
    console.print(table)
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
