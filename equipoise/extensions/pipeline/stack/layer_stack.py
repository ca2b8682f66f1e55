"""The layers of a network that repeat, between which it can be cut without knowing its forward."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

__all__ = ["LayerStack", "largest_stack"]


@dataclass(frozen=True)
class LayerStack:
    """Layers of one class, which a network calls one after the other.

    Attributes:
        names: Names of the layers in the network.
        layers: The layers.
    """

    names: list[str]
    layers: list[nn.Module]


def largest_stack(network: nn.Module) -> LayerStack | None:
    """Return the stack with the most parameters; None if the network has none.

    A stack is a `ModuleList` or `Sequential` of at least two different modules of one class.

    Args:
        network: The network.

    Example:
        >>> network = nn.Sequential(nn.Embedding(9, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        >>> largest_stack(network).names
        ['1.0', '1.1']
    """
    stacks = list(_stacks_of(network))
    if not stacks:
        return None
    # The first one of several equal ones contains the others.
    return max(stacks, key=_size_of)


def _stacks_of(network: nn.Module) -> Iterator[LayerStack]:
    for name, module in network.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        layers = list(module)
        if _repeat(layers):
            prefix = f"{name}." if name else ""
            names = [f"{prefix}{index}" for index in range(len(layers))]
            yield LayerStack(names, layers)


def _repeat(layers: Sequence[nn.Module]) -> bool:
    """Return True for at least two different layers of one class, all of them with parameters."""
    # Layers of one class receive and return the same kinds of values.
    classes = set(map(type, layers))
    # A layer that stands there several times belongs to one stage.
    are_distinct = len(set(map(id, layers))) == len(layers)
    if len(layers) < 2 or len(classes) > 1 or not are_distinct:
        return False
    return all(map(_has_parameters, layers))


def _has_parameters(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters())


def _size_of(stack: LayerStack) -> int:
    size = 0
    for layer in stack.layers:
        size += sum(parameter.numel() for parameter in layer.parameters())
    return size
