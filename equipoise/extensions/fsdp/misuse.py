"""Errors of torch whose cause is a weight in shards: explained by names of the module."""

import linecache
import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from equipoise.errors import StepError
from equipoise.extensions.fsdp.mesh.width_errors import explain_widths
from equipoise.extensions.fsdp.sharded_module import ShardedModule
from equipoise.extensions.fsdp.units import unit_of

__all__ = ["explained"]

# Parts of torch's messages, by which a cause is recognised: a weight in shards meets a whole tensor; the memory of a
# gathered weight was freed; a parameter is made of one whose memory will be freed.
_MIXED_OPERANDS = "mixed torch.Tensor and DTensor"
_FREED_MEMORY = "setStorage"
_PARAMETER_OF_WEIGHT = "Creating a Parameter from an instance of type"

# A name and what follows it, such as `self.blocks[1].up.weight`.
_EXPRESSION = re.compile(r"(\w+)((?:\.\w+|\[\d+\])+)")
_LINK = re.compile(r"\w+")


@contextmanager
def explained(sharded: ShardedModule) -> Iterator[None]:
    """Turn torch's errors about a weight in shards, or about parts of a cut layer, into ones that name the layer.

    Args:
        sharded: The module in shards.

    Raises:
        StepError: If a weight of a unit was used outside of its forward, or a graph whose weights were freed.
        ConfigurationError: If a layer has received a part where it takes a whole, or the reverse.
    """
    try:
        yield
    except RuntimeError as error:
        if _MIXED_OPERANDS in str(error):
            raise StepError(_message(_name_of_weight(error, sharded.module), sharded)) from error
        if _PARAMETER_OF_WEIGHT in str(error):
            raise StepError(
                "A parameter was made of a weight of the module, as by `nn.Parameter(self.layer.weight)`. Under"
                " strategy='fsdp' that weight is whole for a time only, so its memory cannot be shared. Make the"
                " parameter of a copy: `nn.Parameter(self.layer.weight.detach().clone())`."
            ) from error
        if _FREED_MEMORY in str(error):
            raise StepError(
                "A backward needs weights that an earlier backward through the same graph has freed, under"
                " strategy='fsdp'. Add up the losses and run one backward, or compute the forward once more."
            ) from error
        explain_widths(error, sharded.module)
        raise


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


def _name_of_weight(error: RuntimeError, module: nn.Module) -> str | None:
    """Return the name of the sharded weight that the innermost frame of an error refers to; None: unknown."""
    names = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            names[id(parameter)] = name
    found = None
    for frame, number in walk_tb(error.__traceback__):
        # Frames come from the outermost to the innermost, so the last weight counts.
        for value in (*frame.f_locals.values(), *_parameters_named_in_line(frame, number)):
            if id(value) in names:
                found = names[id(value)]
    return found


def _parameters_named_in_line(frame: FrameType, number: int) -> list[Any]:
    """Return the parameters that a line of code names as attributes of local variables; nothing is called.

    Such as `self.layer.weight`, which is no variable of the frame itself.
    """
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
