"""One process alone: functions run here, and values of all processes are its own."""

import torch

from equipoise.parallel.communication.processes import Processes


def test_a_rank_above_0_is_not_the_main_process() -> None:
    processes = Processes()
    processes.rank = 1
    assert not processes.is_main
    assert Processes().is_main


def test_values_of_all_processes_are_the_own_ones() -> None:
    processes = Processes()
    tensor = torch.tensor([1.0, 3.0])
    assert processes.reduce(tensor, reduce_op="sum") is tensor
    assert processes.all_gather(tensor) is tensor
    assert processes.broadcast(tensor) is tensor
    assert processes.gather_objects("value") == ["value"]
    processes.barrier("here")


def test_a_run_ends_after_any_batch_and_a_failure_changes_nothing() -> None:
    processes = Processes()
    processes.mark_failed()
    assert processes.ends_after(batch=1, window=4)
    assert processes.gather_objects(1) == [1]
