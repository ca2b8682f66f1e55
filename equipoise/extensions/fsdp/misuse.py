"""Errors of torch whose cause is a weight in shards, or a layer that is cut: explained by names of the module."""

import linecache
import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from equipoise.errors import ConfigurationError, StepError
from equipoise.extensions.fsdp.mesh.grid import TENSOR, is_cut
from equipoise.extensions.fsdp.sharded_module import ShardedModule
from equipoise.extensions.fsdp.units import unit_of

__all__ = ["explained"]

# A part of torch's message.
_SIGN = "mixed torch.Tensor and DTensor"
# A part of torch's message about the memory of a gathered weight, which was freed.
_FREED = "setStorage"
# A part of torch's message about a parameter that is made of one whose values would be freed with it.
_MADE = "Creating a Parameter from an instance of type"
# Words of which one is in torch's messages about sizes that do not go together.
_SIZES = ("shape", "size", "dim")

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
        if _SIGN in str(error):
            raise StepError(_message(_name_of_weight(error, sharded.module), sharded)) from error
        if _MADE in str(error):
            raise StepError(
                "A parameter was made of a weight of the module, as by `nn.Parameter(self.layer.weight)`. Under"
                " strategy='fsdp' that weight is whole for a time only, so its memory cannot be shared. Make the"
                " parameter of a copy: `nn.Parameter(self.layer.weight.detach().clone())`."
            ) from error
        if _FREED in str(error):
            raise StepError(
                "A backward needs weights that an earlier backward through the same graph has freed, under"
                " strategy='fsdp'. Add up the losses and run one backward, or compute the forward once more."
            ) from error
        is_about_sizes = any(word in str(error) for word in _SIZES)
        cut: Any = next(filter(is_cut, sharded.module.parameters()), None)
        if is_about_sizes and cut is not None:
            mesh = cut.device_mesh
            _check_widths(error, sharded.module, mesh.size(mesh.mesh_dim_names.index(TENSOR)))
        raise


def _check_widths(error: RuntimeError, module: nn.Module, parts: int) -> None:
    """Name the layer that has received a part of its width, or its width from each process; else note where it was.

    Args:
        error: The error.
        module: The module.
        parts: The number of processes over which layers are cut.

    Raises:
        ConfigurationError: If there is such a layer.
    """
    # 1. The innermost layer that was called.
    names = {id(part): name for name, part in module.named_modules()}
    layer: Any = None
    arguments: dict[str, Any] = {}
    for frame, _ in walk_tb(error.__traceback__):
        part = frame.f_locals.get("self")
        if names.get(id(part)):
            layer = part
            arguments = frame.f_locals
    if layer is None:
        return

    # 2. Its width: that of a linear layer, of `Conv1D` of transformers, or of a norm.
    name = f"{names[id(layer)]} ({type(layer).__name__})"
    width = None
    # Other modules may have a width of that name, and something else in their variables.
    if isinstance(layer, nn.Linear):
        width = layer.in_features
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        width = layer.normalized_shape[-1]
    elif vars(layer).keys() >= {"nf", "nx"}:
        width = layer.nx
    received = arguments.get("input", arguments.get("x"))
    received_width = None
    if isinstance(received, Tensor) and received.ndim:
        received_width = received.shape[-1]
    is_cut_width = False
    if width is not None and received_width is not None:
        is_cut_width = received_width * parts == width or width * parts == received_width
    if not is_cut_width:
        error.add_note(
            f"This was in {name}, and layers of the module are cut. All layers that pass parts to one another are in"
            " the plan, and so are numbers that count these parts, as 'divided'."
        )
        return
    rule = (
        "a layer before it is cut, and passes on its part. Add this layer to the plan as well, such as 'rowwise', or"
        " let the other one return whole outputs: 'colwise_gather_output'."
    )
    if isinstance(received, DTensor):
        rule = (
            "it is cut, and takes the parts of a layer before it, which is whole. Add that layer to the plan as well,"
            " such as 'colwise', or let this one take whole inputs: 'rowwise_split_input'."
        )
    raise ConfigurationError(
        f"{name} takes {width} features in the last dimension, and has received {received_width}: {rule}"
    ) from error


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
        for value in (*frame.f_locals.values(), *_named_in_line(frame, number)):
            found = names.get(id(value), found)
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
