"""Compiled blocks compute the same as eager ones, under each strategy that calls blocks as they are."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import ignoring
from tests.extensions.compiled.blocks.networks import AOT, NETWORKS, Counting, CountingBlock, Whole
from tests.extensions.fsdp.programs import STEP, assert_close, fit, in_processes, weights_of

pytestmark = ignoring(r"\w+ has a `validation_step`, but")

TOLERANCE = 1e-10


def trained(kind: Callable[[], Any], strategy: Any, processes: int, **options: Any) -> dict[str, Tensor]:
    """Return the weights after 20 steps."""
    module, _ = fit(kind, strategy, processes, **{"max_epochs": 4, **options})
    return weights_of(module)


def all_trained(kinds: Any, strategy: str) -> list[dict[str, Tensor]]:
    return [trained(kind, strategy, 2, compile=AOT) for kind in kinds]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_are_those_of_one_device(strategy: str) -> None:
    of_networks = in_processes(2, partial(all_trained, NETWORKS, strategy))
    for kind, weights in zip(NETWORKS, of_networks, strict=True):
        assert_close(trained(kind, "single_device", 1), weights, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "dp"])
@pytest.mark.parametrize("kind", [kind for kind in NETWORKS if kind is not Whole])
def test_weights_in_one_process(kind: Callable[[], Any], strategy: str) -> None:
    assert_close(trained(kind, "single_device", 1), trained(kind, strategy, 2, compile=AOT, batch_size=STEP), TOLERANCE)
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "dp"])
def test_the_second_epoch_is_compiled_in_one_process(strategy: str) -> None:
    eager, of_eager = fit(Counting, strategy, 2, count=48)
    compiled, of_compiled = fit(Counting, strategy, 2, count=48, compile=AOT)
    assert_close(weights_of(eager), weights_of(compiled), TOLERANCE)
    assert float(of_eager.callback_metrics["calls"]) > 0
    assert float(of_compiled.callback_metrics["calls"]) == 0
    torch.compiler.reset()


def calls_of(kind: Callable[[], Any], strategy: str) -> tuple[dict[str, Tensor], float]:
    module, trainer = fit(kind, strategy, 2, compile=AOT, max_epochs=1, count=48)
    return weights_of(module), float(trainer.callback_metrics["calls"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_all_batches_but_the_first_are_compiled(strategy: str) -> None:
    weights, calls = in_processes(2, partial(calls_of, Counting, strategy))
    # 3 blocks in 2 processes, of 4 steps.
    assert calls == 6
    assert_close(trained(Counting, "single_device", 1, max_epochs=1, count=48), weights, TOLERANCE)


class OtherInOneProcess(CountingBlock):
    """Is compiled to something else in the second process."""

    def forward(self, hidden: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
            return super().forward(hidden) * 2
        return super().forward(hidden)


class Unequal(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([*self.blocks, OtherInOneProcess(), OtherInOneProcess()])


def unequal() -> tuple[dict[str, Tensor], float]:
    if torch.distributed.get_rank():
        return calls_of(Unequal, "ddp")
    with pytest.warns(UserWarning, match=r"blocks.3 and 1 more \(OtherInOneProcess\) stays eager, because a compiled"):
        return calls_of(Unequal, "ddp")


@pytest.mark.slow
def test_all_processes_decide_alike() -> None:
    weights, calls = in_processes(2, unequal)
    # Of 4 steps in 2 processes: the first of 3 blocks, and all of 2 others.
    assert calls == 6 + 2 * 2 * 4
    assert_close(trained(Unequal, "single_device", 1, max_epochs=1, count=48), weights, TOLERANCE)
