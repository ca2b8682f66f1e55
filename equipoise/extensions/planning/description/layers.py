"""Layers of a network for which there are memory savers: repeated blocks, and frozen layers."""

from collections import Counter

from torch import nn

__all__ = ["has_frozen_layers", "repeated_blocks"]


def repeated_blocks(module: nn.Module) -> list[str]:
    """Return patterns of the blocks that repeat in a network: those of a list or sequence, mostly of one class.

    A block has several submodules and parameters. Of nested lists the outermost counts.

    Example:
        >>> blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3))
        >>> repeated_blocks(nn.ModuleDict({"encoder": blocks}))
        ['encoder.*']
    """
    patterns: list[str] = []
    for name, container in module.named_modules():
        is_list = isinstance(container, nn.ModuleList | nn.Sequential)
        is_inside = any(name.startswith(pattern[:-1]) for pattern in patterns)
        if is_list and name and not is_inside and _repeats(container):
            patterns.append(f"{name}.*")
    return patterns


def _repeats(container: nn.Module) -> bool:
    """Return True if most children are blocks of the same class."""
    children = list(container.children())
    kinds = Counter(type(child) for child in children if _is_block(child))
    most = max(kinds.values(), default=0)
    return most >= 2 and 2 * most > len(children)


def _is_block(module: nn.Module) -> bool:
    return len(list(module.modules())) > 2 and any(True for _ in module.parameters())


def has_frozen_layers(module: nn.Module) -> bool:
    """Return True if a linear layer of a network is not trained, as those of a base model beside adapters.

    Example:
        >>> has_frozen_layers(nn.Sequential(nn.Linear(2, 2).requires_grad_(False)))
        True
    """
    return any(isinstance(part, nn.Linear) and not part.weight.requires_grad for part in module.modules())
