"""Prefetch where there is no CUDA device: it is off, and costs nothing. `tests/simulated` tests it where it is on."""

import logging
from typing import Any

import pytest
import torch

from equipoise import Trainer
from equipoise.trainer.data.transfer.plain_copy import copy_batch
from equipoise.trainer.data.transfer.prefetch import Prefetch
from tests.conftest import ignoring
from tests.support.trainer_runs import Small, loader, refuses, trainer

pytestmark = ignoring()

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("wrong", ["on", None, 1, "True", 2.0])
def test_other_choices_are_refused(wrong: Any) -> None:
    refuses(lambda: Trainer(prefetch=wrong), 'prefetch must be "auto", True or False, not ' + repr(wrong))


@pytest.mark.parametrize("choice", ["auto", False])
def test_the_cpu_keeps_the_plain_copy(choice: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        copier = Prefetch(choice).copier([CPU, CPU])
    assert copier is copy_batch
    assert not caplog.records


def test_who_asks_for_it_on_the_cpu_is_told_once() -> None:
    run = trainer(prefetch=True, max_epochs=3)
    with pytest.warns(UserWarning, match="prefetch=True has no effect here: .* CUDA devices alone") as caught:
        run.fit(Small(), loader())
    assert len([warning for warning in caught if "prefetch" in str(warning.message)]) == 1


def test_false_is_never() -> None:
    assert Prefetch(False).copier([CUDA]) is copy_batch


def test_a_batch_for_the_cpu_among_cuda_devices_is_copied_plainly() -> None:
    batch = [torch.ones(2)]
    copier = Prefetch(True).copier([CUDA])
    assert copier is not copy_batch
    assert copier(batch, CPU) is batch
