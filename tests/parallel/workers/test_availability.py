"""Systems that cannot start worker processes refuse what needs them; `tests/platforms` tries a whole program."""

from collections.abc import Callable
from typing import Any

import pytest

from equipoise import HogwildStrategy, PipelineStrategy, predict_memory
from equipoise.parallel.workers import availability
from equipoise.parallel.workers.availability import can_start_workers
from tests.support.trainer_runs import Small, refuses, trainer

REASON = "needs a fork server, and POSIX signals between processes, but"


@pytest.fixture(autouse=True)
def no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiprocessing starts processes as under Windows."""
    assert can_start_workers()
    monkeypatch.setattr(availability, "get_all_start_methods", lambda: ["spawn"])


REFUSED: list[tuple[Callable[[], Any], tuple[str, ...]]] = [
    *(
        (lambda strategy=strategy: trainer(strategy=strategy, devices=2), ("2 processes", "'single_device', or 'dp'"))
        for strategy in ("ddp", "fsdp", "hogwild", "virtual")
    ),
    (lambda: trainer(strategy=HogwildStrategy(processes=3)), ("3 processes",)),
    (lambda: trainer(strategy=PipelineStrategy(engine="processes"), devices=2), ("engine='threads'",)),
    (lambda: predict_memory(Small(), None), ("Set the batch size by hand",)),
]


@pytest.mark.parametrize(("use", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_needs_several_processes_is_refused(use: Callable[[], Any], words: tuple[str, ...]) -> None:
    refuses(use, REASON, "WSL 2", *words)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hogwild", "pipeline", "dp"])
def test_one_process_is_always_there(strategy: str) -> None:
    assert trainer(strategy=strategy, devices=1).world_size == 1
