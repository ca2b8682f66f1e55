"""The neutral support of recovery: every part of a batch is split, and no step is refused."""

import torch
from torch import nn

from equipoise.parallel.batches.splitting import Splitter
from equipoise.strategies.recovery_support import RecoverySupport


def test_every_part_is_split() -> None:
    parts = [torch.arange(5.0), torch.arange(5.0, 8.0)]
    micro_batches = RecoverySupport().split(parts, 4, Splitter(nn.Linear(1, 1), 0))
    assert [[part.tolist() for part in parts] for parts in micro_batches] == [
        [[0, 1], [5]],
        [[2], [6]],
        [[3], [7]],
        [[4]],
    ]


def test_the_device_of_a_failure_is_the_one_in_the_message() -> None:
    recovery = RecoverySupport()
    assert recovery.device_of_failure("cuda:1") == torch.device("cuda", 1)
    assert recovery.device_of_failure(None) is None


def test_nothing_else_is_needed() -> None:
    recovery = RecoverySupport()
    recovery.enable()
    recovery.reduce_share()
    assert recovery.why_not(training=True, leave_out=True) == ""
    assert not recovery.discard()
