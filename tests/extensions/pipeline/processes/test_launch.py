"""The launch of a pipeline as it is sent to other processes."""

import copy
import pickle

import pytest
import torch

from equipoise.extensions.pipeline.messaging.commands import placeholder
from equipoise.extensions.pipeline.messaging.messages import Messenger
from equipoise.extensions.pipeline.processes.launch import _WRITE_ERROR, StageLaunch
from equipoise.extensions.pipeline.processes.main_process.client import StageClient

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
