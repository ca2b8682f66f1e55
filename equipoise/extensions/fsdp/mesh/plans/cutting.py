"""Layers cut by a plan, those that stay whole, and the reasons in a table."""

import re
from collections import defaultdict
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parameter import is_lazy

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.mesh.plans.sources import Plan
from equipoise.extensions.fsdp.mesh.plans.styles import STYLES, cut_width, is_alone, title_of
from equipoise.extensions.fsdp.units import aligned

__all__ = ["apply_plan", "layers_table", "reasons_of"]

# Attributes that state the width of a head.
_WIDTHS_OF_HEADS = ("head_dim", "attention_head_size", "key_value_proj_dim")


def reasons_of(module: nn.Module, plan: Plan, tensor: int) -> dict[str, str]:
    """Return why layers of a plan stay whole, by their names.

    Layers of a plan with the same parent pass parts to one another: all of them are cut, or none.

    Args:
        module: The module.
        plan: The plan.
        tensor: The number of processes that compute a batch together.
    """
    # 1. Layers that cannot be cut.
    reasons = dict(plan.reasons)
    tied = _tied_layers(module)
    for name in plan.styles:
        reason = tied.get(name) or _reason(module, name, plan, tensor)
        if reason is not None:
            reasons[name] = reason

    # 2. Their neighbours.
    siblings = defaultdict(list)
    for name in plan.styles:
        if not is_alone(plan.styles[name]):
            siblings[_parent(name)].append(name)
    for names in siblings.values():
        first = next((name for name in names if name in reasons), None)
        for name in names:
            if first is not None:
                reasons.setdefault(name, f"{first.rpartition('.')[2]} stays whole")
    return reasons


def _reason(module: nn.Module, name: str, plan: Plan, tensor: int) -> str | None:
    """Return why a layer cannot be cut; None if it can."""
    layer = module.get_submodule(name)
    style = plan.styles[name]
    try:
        width = cut_width(layer, style)
    except TypeError as error:
        return str(error)
    if width is None:
        return None
    if any(parameter.is_meta or is_lazy(parameter) for parameter in layer.parameters()):
        return "its weights have no values yet"
    if any(True for _ in layer.buffers()):
        return "it has buffers, which torch would cut as well"
    if width % tensor:
        return f"a width of {width} is not divisible by {tensor}"
    # Each process has whole heads.
    parent = module.get_submodule(_parent(name))
    for attribute in _WIDTHS_OF_HEADS:
        head = vars(parent).get(attribute)
        if type(head) is int and head > 0 and width % (head * tensor):
            return f"{width // head} heads are not divisible by {tensor}"
    return None


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _tied_layers(module: nn.Module) -> dict[str, str]:
    """Return the reasons of layers that share a parameter with another one, by their names."""
    owners: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owners[id(parameter)].append(_parent(name))
    reasons = {}
    for names in owners.values():
        for name in names:
            others = [other for other in names if other != name]
            if others:
                reasons[name] = f"it shares a weight with {others[0]}"
    return reasons


def apply_plan(module: nn.Module, plan: Plan, reasons: dict[str, str], row: DeviceMesh) -> None:
    """Cut the layers of a plan; all processes call this together.

    Args:
        module: The module.
        plan: The plan.
        reasons: Why layers stay whole, by their names.
        row: The processes that compute a batch together.
    """
    for name, style in plan.styles.items():
        if name not in reasons:
            made = STYLES[style] if isinstance(style, str) else style
            parallelize_module(module.get_submodule(name), row, made)
    cut = [name for name in plan.styles if name not in reasons]
    for name in plan.divided:
        owner, _, attribute = name.rpartition(".")
        prefix = f"{owner}." if owner else ""
        # Where no layer of the owner is cut, each process has all heads.
        if any(layer.startswith(prefix) for layer in cut):
            _divide(module.get_submodule(owner), attribute, name, row.size())


def _divide(part: nn.Module, attribute: str, name: str, tensor: int) -> None:
    number = getattr(part, attribute)
    if number % tensor:
        raise ConfigurationError(
            f"{name} is {number}, which is not divisible by {tensor}. Leave it, and the layers around it, out of the"
            " plan."
        )
    setattr(part, attribute, number // tensor)


def layers_table(module: nn.Module, plan: Plan, reasons: dict[str, str]) -> str:
    """Return the linear layers and embeddings of a module, and what becomes of them, as a table.

    Layers of repeated blocks that are treated alike have one line, with * in the place of their numbers.

    Args:
        module: The module, before it is cut.
        plan: The plan.
        reasons: Why layers stay whole, by their names.
    """
    numbers: dict[tuple[str, str, str], int] = defaultdict(int)
    for row in _rows(module, plan, reasons):
        numbers[row] += 1
    lines = [("layer", "number", "style", "reason")]
    for (name, style, reason), number in numbers.items():
        lines.append((name, str(number), style, reason))
    return aligned(lines)


def _rows(module: nn.Module, plan: Plan, reasons: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    for name, layer in module.named_modules():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", name)
        if name in plan.styles and name not in reasons:
            yield pattern, title_of(plan.styles[name]), ""
        elif name in plan.styles or isinstance(layer, nn.Linear | nn.Embedding):
            reason = reasons.get(name, "it is in no plan")
            yield pattern, "whole", reason
    for name in plan.divided:
        yield re.sub(r"(?<![^.])\d+(?![^.])", "*", name), "divided", ""
