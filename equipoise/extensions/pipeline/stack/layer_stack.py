"""The layers of a network that repeat, between which it can be cut without knowing its forward."""

from collections.abc import Collection, Iterator

from torch import nn

__all__ = ["LayerStack", "largest_stack"]

# Layers of one class, which a network calls one after the other, by their names in the network.
LayerStack = dict[str, nn.Module]


def largest_stack(network: nn.Module) -> LayerStack | None:
    """Return the stack with the most parameters; None if the network has none.

    A stack is a `ModuleList` or `Sequential` of at least two different modules of one class.

    Args:
        network: The network.

    Example:
        >>> network = nn.Sequential(nn.Embedding(9, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        >>> list(largest_stack(network))
        ['1.0', '1.1']
    """
    # The first one of several equal ones contains the others.
    return max(_stacks_of(network), key=_size_of, default=None)


def _stacks_of(network: nn.Module) -> Iterator[LayerStack]:
    for name, module in network.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        # A layer that stands there several times would belong to one stage, so it is named once.
        layers = dict(module.named_children())
        if len(layers) < len(module) or not _repeat(layers.values()):
            continue
        stack = {}
        for layer_name, layer in layers.items():
            stack[f"{name}.{layer_name}".removeprefix(".")] = layer
        yield stack


def _repeat(layers: Collection[nn.Module]) -> bool:
    """Return True for at least two layers of one class, all of them with parameters."""
    # Layers of one class receive and return the same kinds of values.
    classes = set(map(type, layers))
    if len(layers) < 2 or len(classes) > 1:
        return False
    return all(map(_size_of_layer, layers))


def _size_of(stack: LayerStack) -> int:
    return sum(map(_size_of_layer, stack.values()))


def _size_of_layer(layer: nn.Module) -> int:
    return sum(parameter.numel() for parameter in layer.parameters())
