"""Strategies that compute several gradients of a batch: each batch counts once in its window."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from equipoise import Splitter, StepError, StepResult, Strategy
from tests.support.equality import assert_equal
from tests.support.pipelines import quiet
from tests.support.trainer_runs import Small


class InParts(Strategy):
    """Compute one and three quarters of a batch's samples, each with a backward of its own.

    Args:
        announces: Whether the parts are announced.
    """

    name = "in_parts"

    def __init__(self, *, announces: bool = True) -> None:
        self.announces = announces

    def forward_backward(self, step: Any, parts: Sequence[Any], last: bool) -> StepResult:
        splitter = Splitter(self._module)
        size = splitter.size_to_cut(parts[0])
        sizes = [size // 4, size - size // 4]
        for part, samples in zip(splitter.parts(parts[0], sizes), sizes, strict=True):
            if self.announces:
                step.begin_micro_batch(samples, size)
            result: StepResult = step(part)
            step.backward(result)
        return result


def fit(strategy: Any, accumulate: int) -> Small:
    torch.manual_seed(0)
    module = Small()
    data = DataLoader(torch.randn(28, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), batch_size=8)
    trainer = quiet(strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(module, data)
    return module


@pytest.mark.parametrize("accumulate", [1, 3])
def test_announced_parts_count_by_their_samples(accumulate: int) -> None:
    assert_equal(fit("single_device", accumulate), fit(InParts(), accumulate), 1e-12)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_second_backward_of_a_batch_is_refused(accumulate: int) -> None:
    with pytest.raises(StepError, match=r"a second time for the batch 0.*begin_micro_batch.*autograd\.grad"):
        fit(InParts(announces=False), accumulate)
