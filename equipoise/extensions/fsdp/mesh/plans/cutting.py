"""Layers cut by a plan, those that stay whole, and the reasons in a table."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from equipoise.extensions.fsdp.mesh.plans.sources import Plan
from equipoise.extensions.fsdp.mesh.plans.styles import cut_layer, cut_width, is_alone, title_of
from equipoise.formats import align_columns

__all__ = ["apply_plan", "layers_table", "reasons_of"]

# Attributes that state the width of a head.
_WIDTHS_OF_HEADS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
# A number between dots.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


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
        reason = tied.get(name)
        if reason is None:
            reason = _reason(module, name, plan, tensor)
        if reason is not None:
            reasons[name] = reason

    # 2. Layers whose parts cannot be counted.
    for name in plan.divided:
        part, attribute = _owner_of(module, name)
        number = getattr(part, attribute)
        if number % tensor:
            reason = f"{attribute} is {number}, which is not divisible by {tensor}"
            counted = _counted_layers(plan, name)
            for layer in counted:
                reasons.setdefault(layer, reason)

    # 3. Their neighbours, also those of layers and parameters for which torch has no style.
    siblings = defaultdict(list)
    for name in [*plan.reasons, *_together(plan)]:
        siblings[_parent(name)].append(name)
    for names in siblings.values():
        uncut = [name for name in names if name in reasons]
        if uncut:
            _, _, last_part = uncut[0].rpartition(".")
            for name in names:
                reasons.setdefault(name, f"{last_part} stays whole")
    return reasons


def _together(plan: Plan) -> list[str]:
    """Return the layers that pass parts to one another."""
    names = []
    for name, style in plan.styles.items():
        if not is_alone(style):
            names.append(name)
    return names


def _reason(module: nn.Module, name: str, plan: Plan, tensor: int) -> str | None:
    """Return why a layer cannot be cut; None if it can."""
    layer = module.get_submodule(name)
    style = plan.styles[name]
    try:
        width = cut_width(layer, style)
    except TypeError as error:
        return str(error)
    # Norms of a part of the features have nothing to divide.
    if width is None:
        return None
    for parameter in layer.parameters():
        if parameter.is_meta or is_lazy(parameter):
            return "its weights have no values yet"
    if list(layer.buffers()):
        return "it has buffers, which torch would cut as well"
    if width % tensor:
        return f"a width of {width} is not divisible by {tensor}"

    # Each process has whole heads. An embedding has a number for each of them at most.
    if isinstance(layer, nn.Embedding):
        return None
    attributes = vars(module.get_submodule(_parent(name)))
    for attribute in _WIDTHS_OF_HEADS:
        head = attributes.get(attribute)
        # By type, as modules may have something else by this name.
        if type(head) is not int or head <= 0:
            continue
        heads = width // head
        if width % (head * tensor):
            return f"{heads} heads are not divisible by {tensor}"
    return None


def _parent(name: str) -> str:
    parent, _, _ = name.rpartition(".")
    return parent


def _owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has an attribute, and the attribute's own name."""
    owner, _, attribute = name.rpartition(".")
    return module.get_submodule(owner), attribute


def _tied_layers(module: nn.Module) -> dict[str, str]:
    """Return the reasons of layers that share a parameter with another one, by their names."""
    owners: dict[int, list[str]] = defaultdict(list)
    parameters = module.named_parameters(remove_duplicate=False)
    for name, parameter in parameters:
        owners[id(parameter)].append(_parent(name))
    reasons = {}
    for names in owners.values():
        for name in names:
            further = [other for other in names if other != name]
            if further:
                reasons[name] = f"it shares a weight with {further[0]}"
    return reasons


def apply_plan(module: nn.Module, plan: Plan, reasons: dict[str, str], row: DeviceMesh) -> None:
    """Cut the layers of a plan; all processes call this together.

    Args:
        module: The module.
        plan: The plan.
        reasons: Reasons why layers stay whole, by the names of the layers.
        row: The processes that compute a batch together.
    """
    # 1. The layers.
    cut = [name for name in plan.styles if name not in reasons]
    for name in cut:
        cut_layer(module.get_submodule(name), row, plan.styles[name])

    # 2. What counts their heads.
    for name in plan.divided:
        if _is_divided(name, plan, reasons):
            part, attribute = _owner_of(module, name)
            setattr(part, attribute, getattr(part, attribute) // row.size())


def _counted_layers(plan: Plan, name: str) -> list[str]:
    """Return the layers whose parts an attribute counts: those right below its owner, else all below it."""
    owner = _parent(name)
    prefix = f"{owner}."
    if not owner:
        prefix = ""
    below = []
    children = []
    for name in _together(plan):
        if name.startswith(prefix):
            below.append(name)
        if _parent(name) == owner:
            children.append(name)
    return children or below


def _is_divided(name: str, plan: Plan, reasons: dict[str, str]) -> bool:
    """Return True if all layers whose parts an attribute counts are cut, and there is one at least."""
    counted = _counted_layers(plan, name)
    if not counted:
        return False
    return reasons.keys().isdisjoint(counted)


def layers_table(module: nn.Module, plan: Plan, reasons: dict[str, str]) -> str:
    """Return the linear layers and embeddings of a module, and what becomes of them, as a table.

    Layers of repeated blocks that are treated alike have one line, with * in the place of their numbers.

    Args:
        module: The module, before it is cut.
        plan: The plan.
        reasons: Reasons why layers stay whole, by the names of the layers.
    """
    lines = [("layer", "number", "style", "reason")]
    counts = Counter(_rows(module, plan, reasons))
    for row, count in counts.items():
        name, style, reason = row
        lines.append((name, str(count), style, reason))
    return align_columns(lines)


def _rows(module: nn.Module, plan: Plan, reasons: dict[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield the pattern, the style and the reason of each layer."""
    for name, layer in module.named_modules():
        pattern = _NUMBER.sub("*", name)
        style = plan.styles.get(name)
        if style is not None and name not in reasons:
            yield pattern, title_of(style), ""
        elif style is not None or isinstance(layer, nn.Linear | nn.Embedding):
            yield pattern, "whole", reasons.get(name, "it is in no plan")
    for name in plan.divided:
        pattern = _NUMBER.sub("*", name)
        if _is_divided(name, plan, reasons):
            yield pattern, "divided", ""
        else:
            yield pattern, "whole", "layers that it counts stay whole"
