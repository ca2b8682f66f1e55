"""Styles of a plan: the names by which a plan says how a layer is cut, and what torch makes of them."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from equipoise.errors import ConfigurationError

__all__ = [
    "DIVIDED",
    "STYLES",
    "Style",
    "check_plan",
    "cut_layer",
    "cut_width",
    "is_alone",
    "style_of",
    "title_of",
]

# Of an attribute that counts what is cut, such as a number of heads.
DIVIDED = "divided"

Style = str | ParallelStyle

# The names are those of transformers' plans. Their heads lie in dimension 2 where norms of single heads compute.
STYLES: Mapping[str, ParallelStyle] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
}
# Layers of these styles take whole inputs and return whole outputs, whatever becomes of their neighbours.
_ALONE = {"colwise_gather_output", "rowwise_split_input", "embedding_rowwise"}


def check_plan(plan: Any, name: str) -> None:
    """Check the names and styles of a plan that a user has written.

    Args:
        plan: The plan.
        name: Its name in errors.

    Raises:
        ConfigurationError: If it is no mapping of names to styles.
    """
    if not isinstance(plan, Mapping):
        raise ConfigurationError(f"{name} must be a mapping of names to styles, not {plan!r}.")
    names = [*STYLES, DIVIDED]
    for layer, style in plan.items():
        # Objects of torch are compared by identity, so that any of them can be asked for.
        is_style = isinstance(style, ParallelStyle) or style in names
        if not isinstance(layer, str) or not is_style:
            known = ", ".join(map(repr, names))
            raise ConfigurationError(
                f"{name} has the entry {layer!r}: {style!r}. Styles are {known} or an object such as"
                " torch.distributed.tensor.parallel.ColwiseParallel()."
            )


def is_alone(style: Style) -> bool:
    """Return True if a layer can be cut by a style while the layers around it stay whole."""
    return isinstance(style, str) and style in _ALONE


def title_of(style: Style) -> str:
    """Return the name of a style for tables."""
    if isinstance(style, str):
        return style
    return type(style).__name__


def style_of(style: Style) -> ParallelStyle:
    """Return the object of torch that a style names."""
    if isinstance(style, str):
        return STYLES[style]
    return style


def cut_width(layer: nn.Module, style: Style) -> int | None:
    """Return the width of a layer that a style divides; None if it divides none.

    Raises:
        TypeError: If torch cannot cut such a layer by the style.
    """
    # 1. The widths of the outputs and of the inputs. Subclasses may compute something else.
    widths = None
    if type(layer) is nn.Linear:
        widths = (layer.out_features, layer.in_features)
    elif type(layer) is nn.Embedding and layer.max_norm is None:
        widths = (layer.embedding_dim, layer.num_embeddings)
    elif _is_transposed(layer):
        attributes = vars(layer)
        widths = (attributes["nf"], attributes["nx"])

    # 2. The one that is cut.
    torch_style = style_of(style)
    if not isinstance(torch_style, ColwiseParallel | RowwiseParallel):
        return None
    own = dict(layer.named_parameters(recurse=False))
    # A norm of weights computes them from others.
    if widths is None or "weight" not in own:
        kind = type(layer)
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is no plain nn.Linear or nn.Embedding")
    outputs, inputs = widths
    if isinstance(torch_style, ColwiseParallel):
        return outputs
    return inputs


def cut_layer(layer: nn.Module, row: DeviceMesh, style: Style) -> None:
    """Cut a layer; all processes call this together.

    Args:
        layer: The layer.
        row: The processes that compute a batch together.
        style: The style in which it is cut.
    """
    torch_style = style_of(style)
    if _is_transposed(layer) and isinstance(torch_style, ColwiseParallel | RowwiseParallel):
        _cut_transposed(layer, row, torch_style)
    else:
        parallelize_module(layer, row, torch_style)


def _is_transposed(layer: nn.Module) -> bool:
    """Return True for a linear layer of GPT-2 of transformers, which is not imported for it."""
    transformers = sys.modules.get("transformers.pytorch_utils")
    return transformers is not None and type(layer) is transformers.Conv1D


def _cut_transposed(layer: nn.Module, row: DeviceMesh, style: ColwiseParallel | RowwiseParallel) -> None:
    """Cut a layer with a transposed weight, for which torch has no style: the outputs lie in the second dimension."""
    is_columnwise = isinstance(style, ColwiseParallel)
    placements: dict[str, Placement] = {"weight": Shard(0), "bias": Replicate()}
    desired: Placement = Shard(-1)
    if is_columnwise:
        placements = {"weight": Shard(1), "bias": Shard(0)}
        desired = Replicate()

    def partition(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for key, placement in placements.items():
            parameter = part.get_parameter(key)
            cut = distribute_tensor(parameter.detach(), mesh, [placement])
            part.register_parameter(key, nn.Parameter(cut, parameter.requires_grad))

    def enter(part: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        hidden = inputs[0]
        if not isinstance(hidden, DTensor):
            hidden = DTensor.from_local(hidden, mesh, style.input_layouts, run_check=False)
        return hidden.redistribute(placements=[desired])

    def leave(part: nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
        output = output.redistribute(placements=style.output_layouts)
        if style.use_local_output:
            return output.to_local()
        return output

    distribute_module(layer, row, partition, enter, leave)
