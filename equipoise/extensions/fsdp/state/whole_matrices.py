"""Steps of Muon, which orthogonalises whole matrices, while each process has shards of them.

Torch's Muon also takes tensors in shards. But it orthogonalises in bfloat16, where another order of sums shows in the
third digit, and it fails for some shapes. So each matrix is gathered, stepped as on one device, and cut again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Muon, Optimizer

from equipoise.extensions.fsdp.state.gathering import gather_whole
from equipoise.extensions.fsdp.state.loaded_shards import shard_like
from equipoise.interop.torch.optimizers import only_parameter
from equipoise.parallel.optimizers.combined_optimizer import CombinedOptimizer
from equipoise.parallel.strategy_optimizer import StrategyOptimizer

__all__ = ["WholeMatrices", "needs_whole_matrices"]


def needs_whole_matrices(optimizer: Optimizer) -> bool:
    """Return True if an optimiser, or one of several that are stepped as one, computes with whole matrices."""
    return any(isinstance(part, Muon) for part in _parts_of(optimizer))


class WholeMatrices(StrategyOptimizer):
    """Steps an optimiser, of which Muon has one whole matrix at a time, in every process.

    Hooks on a step of Muon run for each matrix. A scaler sees this object as the optimiser.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimiser's groups, for a scaler."""
        return self.optimizer.param_groups

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the optimiser; see `StrategyOptimizer.step`."""
        result = None
        if closure is not None:
            result = closure()
        for part in _parts_of(self.optimizer):
            if isinstance(part, Muon):
                _step_each(part, kwargs)
            else:
                part.step(**kwargs)
        return result

    def unscale(self, scaler: GradScaler) -> None:
        """Divide the gradients by the scale of the loss; see `StrategyOptimizer.unscale`."""
        scaler.unscale_(self)  # type: ignore[arg-type]

    def scaled_step(self, scaler: GradScaler, **kwargs: Any) -> Any:
        """Step the optimiser unless a gradient is not finite; see `StrategyOptimizer.scaled_step`."""
        return scaler.step(self, **kwargs)  # type: ignore[arg-type]


def _parts_of(optimizer: Optimizer) -> list[Optimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        return optimizer.optimizers
    return [optimizer]


def _step_each(optimizer: Optimizer, kwargs: Mapping[str, Any]) -> None:
    """Step the matrices that have a gradient one after the other; they are the same in all processes."""
    trained = []
    for group in optimizer.param_groups:
        trained += [(group, matrix) for matrix in group["params"] if matrix.grad is not None]
    for group, matrix in trained:
        _step_whole(optimizer, group, matrix, kwargs)
    if not trained:
        # Its hooks run in every step.
        optimizer.step(**kwargs)


@torch.no_grad()
def _step_whole(optimizer: Optimizer, group: dict[str, Any], shard: nn.Parameter, kwargs: Mapping[str, Any]) -> None:
    """Step one matrix; one that is not in shards takes the same way."""
    # 1. Gather the matrix, its gradient and its state.
    matrix = nn.Parameter(_gathered(shard.detach()))
    matrix.grad = _gathered(shard.grad)
    if shard in optimizer.state:
        optimizer.state[matrix] = {name: _gathered(value) for name, value in optimizer.state[shard].items()}

    # 2. The step, which is the same in all processes.
    try:
        with only_parameter(optimizer, group, matrix):
            optimizer.step(**kwargs)
    finally:
        state = optimizer.state.pop(matrix, {})

    # 3. Keep the shard of this process.
    shard.copy_(shard_like(shard, matrix.detach()))
    optimizer.state[shard] = {name: shard_like(shard, value) for name, value in state.items()}


def _gathered(value: Any) -> Any:
    """Return a tensor in shards as a whole; everything else as it is."""
    if not isinstance(value, DTensor):
        return value
    return gather_whole(value)
