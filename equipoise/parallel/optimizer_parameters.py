"""The parameters of an optimiser."""

from torch import nn
from torch.optim import Optimizer

__all__ = ["optimizer_parameters"]


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimiser, in the order of its groups.

    Args:
        optimizer: Any optimiser of torch.
    """
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
