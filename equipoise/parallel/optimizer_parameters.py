"""The parameters of optimisers, and their gradients."""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["gradients_of", "load_gradients", "optimizer_parameters"]


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return all parameters of an optimiser, in the order of its groups.

    Args:
        optimizer: Any optimiser of torch.
    """
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(optimizers: Iterable[Optimizer]) -> list[Tensor | None]:
    """Return the gradients of all parameters of optimisers, in order.

    Args:
        optimizers: Any optimisers of torch.
    """
    gradients: list[Tensor | None] = []
    for optimizer in optimizers:
        gradients.extend(parameter.grad for parameter in optimizer_parameters(optimizer))
    return gradients


def load_gradients(optimizers: Iterable[Optimizer], gradients: Iterable[Tensor | None]) -> None:
    """Set the gradients of the parameters of optimisers, on the device of each.

    Args:
        optimizers: Any optimisers of torch.
        gradients: Gradients that `gradients_of` returned. Parameters beyond them keep theirs.
    """
    parameters: list[nn.Parameter] = []
    for optimizer in optimizers:
        parameters.extend(optimizer_parameters(optimizer))
    for parameter, gradient in zip(parameters, gradients, strict=False):
        if gradient is not None:
            gradient = gradient.to(parameter.device)
        parameter.grad = gradient
