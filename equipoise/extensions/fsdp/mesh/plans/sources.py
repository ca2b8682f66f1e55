"""Origins of a plan: the option, the module's own method, and the models of transformers that the module holds."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.mesh.plans.patterns import expression_of
from equipoise.extensions.fsdp.mesh.plans.styles import DIVIDED, STYLES, Style, check_plan

__all__ = ["Plan", "plan_of_models", "written_plan"]

_OPTION = "FSDPStrategy(tensor_plan=...)"


class Plan(NamedTuple):
    """A plan for one module.

    Attributes:
        origin: The origin of the plan, for messages.
        styles: The style of each layer, by its full name, in the order of the module.
        divided: Full names of attributes that are divided by the number of processes.
        reasons: Reasons why layers stay whole that the origin names as well.
    """

    origin: str
    styles: dict[str, Style]
    divided: list[str]
    reasons: dict[str, str]


def written_plan(module: nn.Module, option: Mapping[str, Style] | None) -> Plan | None:
    """Return the plan that the user has written; None if there is none.

    Args:
        module: The module.
        option: The plan of the strategy, which comes before the module's method `tensor_plan`.

    Raises:
        ConfigurationError: If an entry is no style, or names nothing in the module.
    """
    # 1. The entries.
    origin = _OPTION
    if option is None:
        origin = f"{type(module).__name__}.tensor_plan"
        option = getattr(module, "tensor_plan", None)
        if option is None:
            return None
        # A submodule of this name would be called with a batch.
        if callable(option) and not isinstance(option, nn.Module):
            option = option()
        check_plan(option, origin)
    assert option is not None

    # 2. The layers and attributes that they name.
    plan = Plan(origin, {}, [], {})
    layers = _layers_of(module)
    numbers = _numbers_of(module)
    for pattern, style in option.items():
        if style == DIVIDED:
            names = _matching_numbers(numbers, pattern)
            missing = "number of the module or its submodules"
            plan.divided.extend(names)
        else:
            names = _matching(layers, pattern)
            missing = "submodule"
            plan.styles.update(dict.fromkeys(names, style))
        if not names:
            raise ConfigurationError(f"{origin} has the entry {pattern!r}, which names no {missing}.")
    return plan


def _matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names to which a pattern applies."""
    expression = expression_of(pattern)
    return [name for name in names if expression.fullmatch(name)]


def _matching_numbers(names: Iterable[str], pattern: str) -> list[str]:
    """Return the numbers to which a pattern applies; those of the module itself have an owner without a name."""
    matched = _matching([_with_owner(name) for name in names], _with_owner(pattern))
    return [name.removeprefix(".") for name in matched]


def _with_owner(name: str) -> str:
    if "." in name:
        return name
    return f".{name}"


def _layers_of(module: nn.Module) -> list[str]:
    """Return the full names of all submodules."""
    return [name for name, _ in module.named_modules() if name]


def _numbers_of(module: nn.Module) -> list[str]:
    """Return the full names of all attributes with whole numbers."""
    names = []
    for owner, part in module.named_modules():
        for attribute, value in vars(part).items():
            # By type: True counts among the integers.
            if type(value) is int:
                names.append(f"{owner}.{attribute}".removeprefix("."))
    return names


def plan_of_models(module: nn.Module) -> Plan | None:
    """Return the plan that transformers has for the models in a module; None if there is none.

    Args:
        module: The module.
    """
    plan = Plan("transformers", {}, [], {})
    layers = _layers_of(module)
    parameters = [name for name, _ in module.named_parameters()]
    for prefix, styles in _models(module):
        for pattern, style in styles.items():
            for name in _matching(layers, prefix + pattern):
                if style in STYLES:
                    plan.styles[name] = style
                else:
                    plan.reasons[name] = f"torch has no style for {style!r}"
            # Some entries name parameters, such as those of experts in one tensor.
            for name in _matching(parameters, prefix + pattern):
                plan.reasons[name] = "it is a parameter"
    if not plan.styles:
        return None
    return plan


def _models(module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the prefix of the names and the plan of each model, unless it lies in another one."""
    outer: list[str] = []
    for name, part in module.named_modules():
        # A property of transformers, which is not imported for it. Modules around a model pass on its attributes.
        attribute = getattr(type(part), "tp_plan", None)
        is_model = isinstance(attribute, property) and hasattr(part, "config")
        if not is_model:
            continue
        plan: Any = part.tp_plan
        if not isinstance(plan, Mapping) or not plan:
            continue
        prefix = f"{name}."
        if not name:
            prefix = ""
        # Plans of inner models are contained in that of the outer one.
        if not any(prefix.startswith(other) for other in outer):
            outer.append(prefix)
            yield prefix, plan
