"""Systems that cannot start worker processes refuse what needs them; `tests/platforms` tries a whole program."""

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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hogwild", "virtual"])
def test_strategies_of_several_processes(strategy: str) -> None:
    refuses(lambda: trainer(strategy=strategy, devices=2), "2 processes", REASON, "'single_device', or 'dp'", "WSL 2")


def test_processes_without_devices_of_their_own() -> None:
    refuses(lambda: trainer(strategy=HogwildStrategy(processes=3)), "3 processes", REASON)


def test_a_pipeline_in_several_processes() -> None:
    strategy = PipelineStrategy(engine="processes")
    refuses(lambda: trainer(strategy=strategy, devices=2), REASON, "engine='threads'", "WSL 2")


def test_predictions() -> None:
    refuses(lambda: predict_memory(Small(), None), REASON, "Set the batch size by hand", "WSL 2")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hogwild", "virtual", "pipeline", "dp", "balanced"])
def test_one_process_is_always_there(strategy: str) -> None:
    assert trainer(strategy=strategy, devices=1).world_size == 1
