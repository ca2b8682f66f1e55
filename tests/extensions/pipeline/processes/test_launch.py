"""The launch of a pipeline as it is sent to other processes."""

import copy
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from equipoise.extensions.pipeline.messaging.commands import placeholder
from equipoise.extensions.pipeline.messaging.messages import Messenger
from equipoise.extensions.pipeline.processes import launch as launch_module
from equipoise.extensions.pipeline.processes.launch import _WRITE_ERROR, StageLaunch
from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.parallel.communication.process_group import group_apart

CPU = torch.device("cpu")


def do_nothing() -> None:
    """Do nothing when the workers have started."""


def test_copies_of_a_launch_have_no_workers() -> None:
    launch = StageLaunch([CPU, CPU], 1, 60.0, on_joined=do_nothing)
    assert launch.processes is None
    client = StageClient(Messenger(60.0), [CPU, CPU])
    launch.processes = client
    assert launch.processes is client
    for other in (pickle.loads(pickle.dumps(launch)), copy.deepcopy(launch)):
        assert other.processes is None
        assert (other.count, other.spawns, other.device) == (2, True, CPU)
    assert launch.processes is client


def test_writing_to_a_placeholder_is_the_error_that_a_launch_explains() -> None:
    weight = placeholder((2, 3), torch.float64)
    assert weight.shape == (2, 3)
    assert weight.isnan().all()
    with pytest.raises(RuntimeError, match=_WRITE_ERROR):
        weight.add_(1)


@contextmanager
def waiting_worker(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[tuple[list[Any], threading.Thread]]:
    """A worker that waits, no longer than some seconds, for the end of the main process, and the latter's group."""
    monkeypatch.setattr(launch_module, "_FAREWELL", seconds)
    store, limit = HashStore(), timedelta(seconds=120)
    # By rank. Both connect at the same time.
    groups: dict[int, Any] = {}
    waits = threading.Event()
    receive = dist.irecv

    def irecv(*args: Any, **kwargs: Any) -> Any:
        work = receive(*args, **kwargs)
        waits.set()
        return work

    monkeypatch.setattr(dist, "irecv", irecv)

    def work() -> None:
        groups[1] = group_apart(store, "stages", 1, 2, limit, local=True)
        launch_module._await_end(groups[1])

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    main_group = [group_apart(store, "stages", 0, 2, limit, local=True)]
    assert waits.wait(120)
    yield main_group, worker


def test_a_worker_waits_for_the_end_of_a_failed_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends after that, so that launchers name the cause, but does not wait for long."""
    with waiting_worker(monkeypatch, 1000.0) as (main_group, worker):
        assert worker.is_alive()
        # This closes the connection, as the end of the process does.
        main_group.clear()
        worker.join(120)
        assert not worker.is_alive()
    with waiting_worker(monkeypatch, 0.01) as (_, worker):
        worker.join(120)
        assert not worker.is_alive()
