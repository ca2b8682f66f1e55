"""Weights of a unit that are used outside of its forward, where they are in shards: noticed, and named."""

import linecache
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from equipoise.errors import StepError
from equipoise.extensions.fsdp.sharded_module import ShardedModule
from equipoise.extensions.fsdp.units import unit_of

__all__ = ["explained"]

# A part of torch's message.
_SIGN = "mixed torch.Tensor and DTensor"

# A name and what follows it, such as `self.blocks[1].up.weight`.
_EXPRESSION = re.compile(r"(\w+)((?:\.\w+|\[\d+\])+)")
_LINK = re.compile(r"\w+")


@contextmanager
def explained(sharded: ShardedModule) -> Iterator[None]:
    """Turn torch's error about a weight in shards into one that names the weight and its unit.

    Args:
        sharded: The module in shards.

    Raises:
        StepError: If a weight of a unit was used outside of its forward.
    """
    try:
        yield
    except RuntimeError as error:
        if _SIGN not in str(error):
            raise
        name = _name_of_weight(error.__traceback__, sharded.module)
        raise StepError(_message(name, sharded)) from error


def _message(name: str | None, sharded: ShardedModule) -> str:
    if name is None:
        return (
            "A weight in shards was used outside of the forward of its unit. Name the units whose weights are used by"
            " their forward alone: FSDPStrategy(units=[...]). Or a layer that `configure_model` has cut passed a"
            " DTensor to one that is whole: then its plan needs use_local_output=True."
        )
    unit = unit_of(name, sharded.units)
    if not unit.name:
        return (
            f"{name} belongs to the root, whose weights are whole within the steps alone, but it was used elsewhere."
            " Use it within `training_step` or its siblings."
        )
    return (
        f"{name} was used outside of the forward of its unit {unit.name}, where it is in shards. Name units that leave"
        f" {unit.name} out, so that its weights stay with a unit around it: FSDPStrategy(units=[...])."
    )


def _name_of_weight(traceback: TracebackType | None, module: nn.Module) -> str | None:
    """Return the name of the sharded weight that the innermost frame of a traceback refers to; None: unknown."""
    names = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            names[id(parameter)] = name
    found = None
    while traceback is not None:
        values = list(traceback.tb_frame.f_locals.values())
        values += _named_in_line(traceback.tb_frame, traceback.tb_lineno)
        for value in values:
            found = names.get(id(value), found)
        traceback = traceback.tb_next
    return found


def _named_in_line(frame: FrameType, number: int) -> list[Any]:
    """Return the parameters that a line of code names as attributes of local variables; nothing is called."""
    parameters = []
    line = linecache.getline(frame.f_code.co_filename, number)
    for variable, path in _EXPRESSION.findall(line):
        value: Any = frame.f_locals.get(variable)
        for name in _LINK.findall(path):
            if not isinstance(value, nn.Module):
                break
            attributes: dict[str, Any] = {**dict(value.named_children()), **dict(value.named_parameters(recurse=False))}
            value = attributes.get(name)
            if isinstance(value, nn.Parameter):
                parameters.append(value)
    return parameters
