"""Errors of torch about sizes that do not go together, where layers are cut: the layer and the remedy are named."""

from traceback import walk_tb
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.mesh.grid import TENSOR, is_cut

__all__ = ["explain_widths"]

# Words of which one is in each of torch's messages about sizes; in any other message, they cost a note that is wrong.
_WORDS_ABOUT_SIZES = ("shape", "size", "dim")
_CUT_BEFORE = (
    "a layer before it is cut, and passes on its part. Add this layer to the plan as well, such as 'rowwise', or let"
    " the other one return whole outputs: 'colwise_gather_output'."
)
_WHOLE_BEFORE = (
    "it is cut, and takes the parts of a layer before it, which is whole. Add that layer to the plan as well, such as"
    " 'colwise', or let this one take whole inputs: 'rowwise_split_input'."
)


def explain_widths(error: RuntimeError, module: nn.Module) -> None:
    """Raise an error that names the layer which has received a part of its width, or a whole in place of a part.

    An error about sizes with another cause receives a note with the layer in which it was.

    Args:
        error: An error of torch in a step of the module.
        module: The module; without cut layers, nothing is done.

    Raises:
        ConfigurationError: If there is such a layer.
    """
    cut: Any = next(filter(is_cut, module.parameters()), None)
    if cut is None or not any(word in str(error) for word in _WORDS_ABOUT_SIZES):
        return
    parts = cut.device_mesh.size(cut.device_mesh.mesh_dim_names.index(TENSOR))
    name, layer, variables = _innermost_layer(error, module)
    if not name:
        return
    width = _width_of(layer)
    received = variables.get("input", variables.get("x"))
    received_width = None
    if isinstance(received, Tensor) and received.ndim:
        received_width = received.shape[-1]
    is_part_or_whole = False
    if width is not None and received_width is not None:
        is_part_or_whole = received_width * parts == width or width * parts == received_width
    described = f"{name} ({type(layer).__name__})"
    if not is_part_or_whole:
        error.add_note(
            f"This was in {described}, and layers of the module are cut. All layers that pass parts to one another are"
            " in the plan, and so are numbers that count these parts, as 'divided'."
        )
        return
    rule = _WHOLE_BEFORE if isinstance(received, DTensor) else _CUT_BEFORE
    raise ConfigurationError(
        f"{described} takes {width} features in the last dimension, and has received {received_width}: {rule}"
    ) from error


def _innermost_layer(error: RuntimeError, module: nn.Module) -> tuple[str, Any, dict[str, Any]]:
    """Return the name of the innermost submodule that was called, it itself, and the variables of its call.

    The name is empty if there is none; that of the module itself is as well.
    """
    names = {id(part): name for name, part in module.named_modules()}
    innermost: tuple[str, Any, dict[str, Any]] = ("", None, {})
    for frame, _ in walk_tb(error.__traceback__):
        part = frame.f_locals.get("self")
        if names.get(id(part)):
            innermost = (names[id(part)], part, frame.f_locals)
    return innermost


def _width_of(layer: Any) -> int | None:
    """Return the number of features that a layer takes; None for layers of other classes.

    An attribute `in_features` of any other class may mean something else.
    """
    if isinstance(layer, nn.Linear):
        return layer.in_features
    if isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        return layer.normalized_shape[-1]
    # `Conv1D` of transformers.
    if vars(layer).keys() >= {"nf", "nx"}:
        return int(layer.nx)
    return None
