"""Frozen linear layers, whose weights may be stored in few bits."""

from torch import nn

__all__ = ["has_frozen_layers"]


def has_frozen_layers(module: nn.Module) -> bool:
    """Return True if a linear layer of a network is not trained, as those of a base model beside adapters.

    Example:
        >>> has_frozen_layers(nn.Sequential(nn.Linear(2, 2).requires_grad_(False)))
        True
    """
    return any(isinstance(part, nn.Linear) and not part.weight.requires_grad for part in module.modules())
