"""Origins of a plan: the option, the module's own method, and the models of transformers that the module holds."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.mesh.plans.styles import DIVIDED, STYLES, Style, check_plan
from equipoise.extensions.fsdp.units import expression_of

__all__ = ["Plan", "given_plan", "plan_of_models"]

_OPTION = "FSDPStrategy(tensor_plan=...)"


class Plan(NamedTuple):
    """A plan for one module.

    Attributes:
        origin: Where it comes from, for messages.
        styles: The style of each layer, by its full name, in the order of the module.
        divided: Full names of attributes that are divided by the number of processes.
        reasons: Why layers stay whole that the origin names as well.
    """

    origin: str
    styles: dict[str, Style]
    divided: list[str]
    reasons: dict[str, str]


def given_plan(module: nn.Module, option: Mapping[str, Style] | None) -> Plan | None:
    """Return the plan that the user has written; None if there is none.

    Args:
        module: The module.
        option: The plan of the strategy, which comes before the module's method `tensor_plan`.

    Raises:
        ConfigurationError: If an entry is no style, or names nothing in the module.
    """
    origin = _OPTION
    if option is None:
        method = getattr(module, "tensor_plan", None)
        if not callable(method):
            return None
        origin = f"{type(module).__name__}.tensor_plan()"
        option = method()
        check_plan(option, origin)
    assert option is not None
    plan = Plan(origin, {}, [], {})
    for pattern, style in option.items():
        if style == DIVIDED:
            names = _attributes(module, pattern)
            plan.divided.extend(names)
        else:
            names = _layers(module, pattern)
            plan.styles.update(dict.fromkeys(names, style))
        if not names:
            kind = "number of the module or its submodules" if style == DIVIDED else "submodule"
            raise ConfigurationError(f"{origin} has the entry {pattern!r}, which names no {kind}.")
    return plan


def _layers(module: nn.Module, pattern: str, prefix: str = "") -> list[str]:
    """Return the full names of the submodules that a pattern names."""
    expression = expression_of(prefix + pattern)
    return [name for name, _ in module.named_modules() if name and expression.fullmatch(name)]


def _attributes(module: nn.Module, pattern: str) -> list[str]:
    """Return the full names of the attributes with whole numbers that a pattern names."""
    owners, _, attribute = pattern.rpartition(".")
    expression = expression_of(owners)
    names = []
    for name, part in module.named_modules():
        is_number = type(vars(part).get(attribute)) is int
        if is_number and expression.fullmatch(name):
            names.append(f"{name}.{attribute}" if name else attribute)
    return names


def plan_of_models(module: nn.Module) -> Plan | None:
    """Return the plan that transformers has for the models in a module; None if there is none.

    Args:
        module: The module.
    """
    plan = Plan("transformers", {}, [], {})
    for prefix, styles in _models(module):
        for pattern, style in styles.items():
            # Some entries name parameters, such as those of experts in one tensor.
            for name in _layers(module, pattern, prefix):
                if style in STYLES:
                    plan.styles[name] = style
                else:
                    plan.reasons[name] = f"torch has no style for {style!r}"
    return plan if plan.styles else None


def _models(module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the prefix of the names and the plan of each model, unless it lies in another one."""
    found: list[str] = []
    for name, part in module.named_modules():
        # The attribute is that of transformers, which is not imported for it.
        plan = getattr(part, "tp_plan", None) if hasattr(part, "config") else None
        prefix = f"{name}." if name else ""
        if isinstance(plan, Mapping) and plan and not any(prefix.startswith(outer) for outer in found):
            found.append(prefix)
            yield prefix, plan
