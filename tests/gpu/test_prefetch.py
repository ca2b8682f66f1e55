"""Batches travel to a GPU beside its computation: the same results to the bit, and no wait."""

from typing import Any

import pytest
import torch

from equipoise.trainer.data.prefetch import Prefetch
from tests.gpu.runs import GPU, Classifier, fit
from tests.gpu.waits import FIRST, STEPS, train

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")

LARGE = [4096, 4096, 1000, 4096]


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("strategy", ["single_device", "dp"])
def test_results_are_the_same(strategy: str, pinned: bool) -> None:
    def weights(prefetch: Any) -> list[torch.Tensor]:
        parts = 1 if strategy == "single_device" else 2
        module, _, _ = fit(Classifier, sizes=LARGE, pinned=pinned, prefetch=prefetch, strategy=strategy, parts=parts)
        return [parameter.cpu() for parameter in module.parameters()]

    in_turn = weights(False)
    for prefetch in (True, "auto"):
        for one, other in zip(weights(prefetch), in_turn, strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("waits_allowed_again")
def test_batches_that_are_not_pinned_let_nobody_wait() -> None:
    assert train(pinned=False, prefetch=True).guarded == len(STEPS) - FIRST


@pytest.mark.not_simulated("no queue: they compute at once")
def test_prefetch_copies_a_batch_while_the_device_computes() -> None:
    copy = Prefetch(True).copier([GPU])
    batch = torch.ones(1 << 20)
    copy(batch, GPU)  # its memory, and its stream, are there from now on
    matrix = torch.randn(4096, 4096, device=GPU)
    user = torch.cuda.Stream(GPU)
    for _ in range(200):
        matrix = (matrix @ matrix).clamp(-1, 1)
    computed = torch.cuda.current_stream(GPU).record_event()
    # A stream that waits for the batch alone.
    with torch.cuda.stream(user):
        total = copy(batch, GPU).sum()
    user.synchronize()
    assert not computed.query(), "the batch waited for the computation"
    assert total.item() == 1 << 20
    torch.cuda.synchronize()
