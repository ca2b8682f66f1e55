"""Hooks that exchange gradients, with a state that needs the process group of each process."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy as TheirDDP
from torch import Tensor, nn
from torch.distributed import GradBucket, get_world_size
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from equipoise import DDPStrategy
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Small, refuses, trainer

OPTIONS: dict[str, Any] = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 0.5}


class Wide(Small):
    """Has a weight whose gradients, of a few samples each, are of a low rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(8, 6).double()

    def loss(self, batch: Any) -> Any:
        return self.layer(batch[0]).square().mean()


def fitted(strategy: Any, devices: int = 2) -> Any:
    torch.manual_seed(2)
    loader = DataLoader(TensorDataset(torch.randn(12, 8, dtype=torch.float64)), batch_size=2 // devices)
    module = Wide()
    trainer(strategy=strategy, devices=devices, max_epochs=1).fit(module, loader)
    return module


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "strategy",
    [
        DDPStrategy(comm_hook=powerSGD_hook, comm_state=partial(PowerSGDState, None, **OPTIONS)),
        TheirDDP(ddp_comm_hook=powerSGD_hook, ddp_comm_state=PowerSGDState(None, **OPTIONS)),
    ],
    ids=["made in each process", "Lightning's, made before"],
)
def test_hooks_that_compress_gradients_of_a_low_rank_run_on_the_cpu_without_loss(strategy: Any) -> None:
    """Two samples in a step: a gradient of rank 2 at most. The last digits show that it was compressed."""
    expected, actual = fitted("single_device", 1), fitted(strategy)
    assert_equal(expected, actual, 1e-9)
    assert not torch.equal(expected.layer.weight, actual.layer.weight)


def counted(state: list[int], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    state[0] += get_world_size()
    if state[0] > 2:
        raise RuntimeError(f"The state counted {state[0]}.")
    return allreduce_hook(None, bucket)


def test_a_function_that_makes_the_state_is_called_in_the_process_group() -> None:
    """The first bucket adds the number of processes, and the second one fails with the sum."""
    strategy = DDPStrategy(comm_hook=counted, comm_state=lambda: [get_world_size() - 2])
    with pytest.raises(RuntimeError, match="The state counted 4"):
        fitted(strategy)


def test_a_state_without_a_hook_is_refused() -> None:
    refuses(lambda: DDPStrategy(comm_state=3), "comm_state is the state of comm_hook, which is missing")
