"""Runs of a program that is killed and resumed, beside one that is not."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from processes import attempt
from programs import IN_PROCESSES, Case, Kill, train

__all__ = ["Outcome", "killed_and_resumed", "undisturbed"]


@dataclass
class Outcome:
    """End of a program.

    Attributes:
        values: What `train` returned.
        seen: The samples of each batch, by process, epoch and batch.
        rows: The text of `metrics.csv`.
        kills: How many processes were killed.
        calls: The number of calls of functions in each process, if it was counted.
    """

    values: dict[str, Any]
    seen: dict[tuple[int, int, int], list[list[int]]]
    rows: str
    kills: int = 0
    calls: dict[int, int] = field(default_factory=dict)


def undisturbed(case: Case, folder: Path, limit: float) -> Outcome:
    """Runs a program to its end.

    Args:
        case: The program.
        folder: Where its files go.
        limit: Seconds for each process.
    """
    folder.mkdir(parents=True)
    count = Kill(None, rank=None, folder=folder)
    if not attempt(lambda: _keep(folder, train(case, folder, count, resume=False)), folder, limit):
        raise AssertionError("the undisturbed run was killed")
    return _outcome(folder, kills=0)


def killed_and_resumed(case: Case, folder: Path, calls: dict[int, int], limit: float) -> Outcome:
    """Runs a program that is killed once or twice, and resumed after each kill.

    Args:
        case: The program.
        folder: Where its files go.
        calls: The number of calls of functions that each process of the undisturbed run made.
        limit: Seconds for each process.
    """
    folder.mkdir(parents=True)
    choose = Random(f"kill {case.mode} {case.seed}")
    planned = choose.choice([1, 1, 2])
    kills = 0
    for number in range(planned):
        moment = choose.uniform(0.1, 1.0) / (number + 1)
        rank = choose.randrange(2) if case.mode in ("ddp", "uneven", "replicas") else 0
        at = int(calls[rank] * moment)
        kills_caller = case.mode in IN_PROCESSES and choose.random() < 0.3

        def run(at: int = at, rank: int = rank, kills_caller: bool = kills_caller, resume: bool = number > 0) -> None:
            kill = Kill(at, rank, os.getpid() if kills_caller else None)
            _keep(folder, train(case, folder, kill, resume=resume))

        if attempt(run, folder, limit):
            break  # it came to its end before the kill
        kills += 1
    else:
        if not attempt(lambda: _keep(folder, train(case, folder, Kill(None), resume=True)), folder, limit):
            raise AssertionError("the resumed run was killed")
    return _outcome(folder, kills)


def _keep(folder: Path, values: dict[str, Any]) -> None:
    torch.save(values, folder / "values.pt")


def _outcome(folder: Path, kills: int) -> Outcome:
    values = torch.load(folder / "values.pt", weights_only=False)  # written by this program a moment ago
    rows = (folder / "metrics.csv").read_text()
    calls = {int(path.stem.rpartition("-")[2]): int(path.read_text()) for path in folder.glob("calls-*.txt")}
    return Outcome(values, _seen(folder), rows, kills, calls)


def _seen(folder: Path) -> dict[tuple[int, int, int], list[list[int]]]:
    """Return what the processes noted; a batch that was computed again must have had the same samples."""
    seen: dict[tuple[int, int, int], list[list[int]]] = {}
    for path in sorted(folder.glob("seen-*.jsonl")):
        rank = int(path.stem.rpartition("-")[2])
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # a line that was cut off
                epoch, batch, indices = json.loads(line)
                earlier = seen.setdefault((rank, epoch, batch), indices)
                assert earlier == indices, f"epoch {epoch}, batch {batch}: {indices}, but {earlier} before the kill"
    return seen
