"""Functions that run in the processes of a group, and what all of them answer."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from equipoise.parallel.communication.process_group import StoreServer, follows_from_another, joined
from equipoise.parallel.communication.rank import Rank
from equipoise.parallel.workers.launch import launch

__all__ = ["CPU", "PATIENCE", "cases_in_group", "gathered", "group", "in_group", "started", "summed"]

CPU, PATIENCE = torch.device("cpu"), timedelta(seconds=120)


def started(function: Callable[..., Any], *arguments: Any, processes: int = 2, port: int | None = None) -> Any:
    """Return the first process's answer to `function(place, port, *arguments)`.

    Args:
        function: The function, which a worker can import or which can be sent.
        arguments: What follows the `Rank` of the process and the port of a store.
        processes: The number of processes. Default: 2.
        port: The port at which they meet. Default: that of a store of this process.
    """
    store = StoreServer() if port is None else None
    worker = partial(_start, function, port if store is None else store.port, arguments, processes)
    return launch(worker, processes, is_consequence=follows_from_another)


def _start(function: Any, port: int, arguments: Any, processes: int, rank: int) -> Any:
    return function(Rank(rank, rank, 0, processes, processes), port, *arguments)


def in_group(function: Callable[..., Any], *arguments: Any, processes: int = 2) -> list[Any]:
    """Return the answers of all processes of a group to `function(rank, *arguments)`, in order."""
    answers: list[Any] = started(_join, function, arguments, processes=processes)
    return answers


def cases_in_group(function: Callable[..., Any], cases: Sequence[Sequence[Any]], processes: int = 2) -> list[list[Any]]:
    """Return the answers of all processes to `function(rank, *case)` for each case; the processes start once."""
    answers = in_group(_each, function, cases, processes=processes)
    return [list(of_case) for of_case in zip(*answers, strict=True)]


def _each(rank: int, function: Any, cases: Sequence[Sequence[Any]]) -> list[Any]:
    return [function(rank, *case) for case in cases]


def _join(place: Rank, port: int, function: Any, arguments: Any) -> list[Any]:
    with joined(place, CPU, timeout=PATIENCE, port=port):
        return gathered(function(place.global_rank, *arguments))


def gathered(value: Any) -> list[Any]:
    """The values of all processes."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def summed() -> float:
    """1 + 2 + ..., over all processes."""
    value = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(value)
    return float(value)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
