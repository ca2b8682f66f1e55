"""Training modes of a module and of all its submodules, which may differ."""

from collections.abc import Sequence

from torch import nn

__all__ = ["modes_of", "set_modes"]


def modes_of(module: nn.Module) -> list[bool]:
    """Return the training mode of a module and of each of its submodules, in the order of `module.modules()`."""
    return [submodule.training for submodule in module.modules()]


def set_modes(module: nn.Module, modes: Sequence[bool]) -> None:
    """Set the training mode of a module and of each of its submodules.

    Args:
        module: The module.
        modes: Result of `modes_of` for a module with the same submodules.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        >>> modes = modes_of(model.train())
        >>> _ = model.eval()
        >>> set_modes(model, modes)
        >>> modes_of(model)
        [True, True, True]
    """
    for submodule, mode in zip(module.modules(), modes, strict=True):
        submodule.training = mode
