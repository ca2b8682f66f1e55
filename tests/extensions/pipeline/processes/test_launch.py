"""The launch of a pipeline as it is sent to other processes."""

import pytest
import torch

from equipoise.extensions.pipeline.messaging.commands import placeholder
from equipoise.extensions.pipeline.processes.launch import _WRITE_ERROR


def test_writing_to_a_placeholder_is_the_error_that_a_launch_explains() -> None:
    weight = placeholder((2, 3), torch.float64)
    assert weight.shape == (2, 3)
    assert weight.isnan().all()
    with pytest.raises(RuntimeError, match=_WRITE_ERROR):
        weight.add_(1)
