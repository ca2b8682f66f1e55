"""The linear layers of a module that a callback exchanges for others: chosen by name, and replaced in their parents."""

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.modules import STRUCTURE, children_of

__all__ = ["check_names", "check_strategy", "keep_attributes", "linear_layers", "read_elsewhere", "replace", "require"]

# Strategies that compute with the layers of the module, or with copies of them.
_STRATEGIES = ("single_device", "dp", "balanced", "ddp", "fsdp", "pipeline")

# Names that an error lists.
_MOST_NAMES = 5


def check_names(callback: str, **arguments: object) -> None:
    """Check lists of names or patterns.

    Args:
        callback: The name of the callback.
        arguments: The lists, by the name of the argument; None where there is none.

    Raises:
        ConfigurationError: If one is something else.
    """
    for argument, patterns in arguments.items():
        is_valid = patterns is None or _is_list_of_names(patterns)
        if not is_valid:
            raise ConfigurationError(
                f"{callback}({argument}=...) is a list of names of layers, such as ['*.mlp.*'], not {patterns!r}."
            )


def _is_list_of_names(patterns: object) -> bool:
    # A text is a sequence of texts.
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        return False
    return all(isinstance(name, str) for name in patterns)


def check_strategy(callback: str, strategy: Any) -> None:
    """Check that a strategy computes with whatever layers a module has, and saves the module's own state.

    Args:
        callback: The name of the callback.
        strategy: The strategy of the trainer.

    Raises:
        ConfigurationError: If it does not.
    """
    if strategy.name not in _STRATEGIES:
        raise ConfigurationError(
            f"{callback} does not go with strategy={strategy.name!r}. Take one of {', '.join(_STRATEGIES)}."
        )


def require(package: str, callback: str) -> None:
    """Check that a package is installed, without importing it.

    Args:
        package: The package, as Python imports it.
        callback: The name of the callback that needs it, for the message.

    Raises:
        ConfigurationError: If it is not installed.
    """
    if find_spec(package) is None:
        raise ConfigurationError(f"{callback} needs {package}: pip install 'equipoise[finetuning]'.")


def linear_layers(
    module: nn.Module, layers: Sequence[str] | None, exclude: Sequence[str], callback: str
) -> dict[str, nn.Linear]:
    """Return the linear layers of a module by name, without those that derive from `nn.Linear` or are parametrised.

    Args:
        module: The module.
        layers: Names or patterns of them, in which * stands for anything, dots included; the names of submodules
            stand for the layers inside. None: all layers.
        exclude: Those to be left out, in the same way.
        callback: The name of the callback, for messages.

    Raises:
        ConfigurationError: If a pattern matches no linear layer.
    """
    included = list(layers or ())
    excluded = list(exclude or ())
    all_layers = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    # An earlier run may have exchanged some for others, so the names of these count, too.
    _check_patterns([*included, *excluded], list(all_layers), callback)
    chosen = {}
    for name, layer in all_layers.items():
        # Other classes may read their weights without calling the layer, as attention does.
        if type(layer) is not nn.Linear or is_parametrized(layer):
            continue
        is_included = layers is None or _matches(name, included)
        if is_included and not _matches(name, excluded):
            chosen[name] = layer
    return chosen


def _check_patterns(patterns: Sequence[str], names: Sequence[str], callback: str) -> None:
    """Check that each pattern names a linear layer.

    Raises:
        ConfigurationError: If one does not.
    """
    for pattern in patterns:
        matches_a_layer = any(_matches(name, [pattern]) for name in names)
        if not matches_a_layer:
            examples = ", ".join(names[:_MOST_NAMES]) or "there is none"
            raise ConfigurationError(f"{callback}: {pattern!r} matches no linear layer. Layers: {examples}.")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    # The name of a submodule stands for all inside.
    inside = [f"{pattern}.*" for pattern in patterns]
    return any(fnmatchcase(name, pattern) for pattern in [*patterns, *inside])


def read_elsewhere(module: nn.Module) -> set[nn.Module]:
    """Return parts whose weights are also read without calling the layers."""
    parts: set[nn.Module] = set()
    for block in module.modules():
        # Torch's own blocks read the weights of their layers in evaluations.
        if isinstance(block, nn.TransformerEncoderLayer):
            parts.update(block.modules())
        # So do layers of peft with the small ones of their adapters.
        for name in getattr(block, "adapter_layer_names", ()):
            adapters = getattr(block, name, None)
            if isinstance(adapters, nn.Module):
                parts.update(adapters.modules())
    return parts


def replace(module: nn.Module, exchange: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replace submodules in all of their parents.

    Args:
        module: The module.
        exchange: Returns the module that takes the place of a submodule; None if the submodule stays.
    """
    others: dict[nn.Module, nn.Module | None] = {}
    for parent in list(module.modules()):
        # One submodule may have several names, of which `named_children` yields one.
        children = dict(children_of(parent))
        for name, child in children.items():
            if child is None:
                continue
            if child not in others:
                others[child] = exchange(child)
            other = others[child]
            if other is not None:
                setattr(parent, name, other)


def keep_attributes(layer: nn.Module, other: nn.Module) -> None:
    """Copy attributes other than parameters to the layer that replaces another one: hooks, and whether it trains.

    Args:
        layer: The layer that is replaced.
        other: The layer that takes its place.
    """
    replaced_attributes = vars(layer)
    attributes = vars(other)
    for name in attributes:
        if name in replaced_attributes and name not in STRUCTURE:
            attributes[name] = replaced_attributes[name]
