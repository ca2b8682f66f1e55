"""Models of transformers that receive parts of sequences: their masks, positions and labels."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.fsdp.interop.attention_of_models import OtherAttention, models_of_transformers
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow

__all__ = ["DividedModels"]

# The name of the attention among those of transformers.
_NAME = "equipoise_context"
_IGNORED = -100


class DividedModels:
    """Lets the models of transformers in a module compute parts of sequences, in `with` blocks.

    Their attention is `scaled_dot_product_attention`, with masks for whole sequences. They receive `position_ids` and,
    where they compute a loss, `shift_labels`.

    Args:
        module: The user's module.
        row: The processes that have parts of the sequences.
    """

    def __init__(self, module: nn.Module, row: SequenceRow) -> None:
        self._hooks = []
        models = list(models_of_transformers(module))
        if models:
            # Imported by the module already.
            import transformers

            sdpa = transformers.AttentionInterface()["sdpa"]  # type: ignore[no-untyped-call]
            transformers.AttentionInterface.register(_NAME, sdpa)
            transformers.AttentionMaskInterface.register(_NAME, partial(_mask, row))
        for model in models:
            self._hooks.append(model.register_forward_pre_hook(partial(_complete, row), with_kwargs=True))
        self.attention = OtherAttention(module, _NAME)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def _complete(row: SequenceRow, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Add to the inputs of a model what it would make wrongly from a part of a sequence."""
    # 1. The inputs, if they are a part.
    signature = inspect.signature(model.forward)
    inputs = signature.bind_partial(*args, **kwargs).arguments
    tokens = inputs.get("input_ids")
    if tokens is None:
        tokens = inputs.get("inputs_embeds")
    if not row.is_divided or tokens is None or tokens.size(1) != row.part_length:
        return None
    kwargs = dict(kwargs)
    shape = tokens.shape[:2]

    # 2. Positions.
    positions = inputs.get("position_ids")
    if positions is None and "position_ids" in signature.parameters:
        positions = row.positions(tokens.device)
        kwargs["position_ids"] = positions.expand(shape)
    mask = inputs.get("attention_mask")
    if mask is None and positions is not None and "attention_mask" in signature.parameters:
        # A model that keeps keys takes each sample for one sequence.
        numbers = None
        if not _keeps_keys(model, kwargs):
            numbers = _numbers_of_sequences(row, positions.expand(shape))
        row.sequences = numbers
        # Without a mask, transformers would take each piece for a sequence.
        mask = torch.ones(shape, dtype=torch.int64, device=tokens.device)
        kwargs["attention_mask"] = mask
        row.ones = mask
    # An outer model hands it on to an inner one.
    row.has_padding = mask is not row.ones

    # 3. The labels of the next tokens, some of which other processes have.
    labels = inputs.get("labels")
    if labels is not None and kwargs.get("shift_labels") is None and _shifts_labels(model):
        padded = nn.functional.pad(row.gather(labels, 1)[:, 1:], (0, 1), value=_IGNORED)
        kwargs["shift_labels"] = row.own_part(padded, 1)
    return args, kwargs


def _numbers_of_sequences(row: SequenceRow, positions: Tensor) -> Tensor | None:
    """Return the number of the sequence at each position of the samples; None if each sample is one."""
    # Where positions begin again, another sequence begins.
    begins = row.gather(positions, 1).diff(dim=1) != 1
    if not bool(begins.any()):
        return None
    return nn.functional.pad(begins.cumsum(1), (1, 0))


def _keeps_keys(model: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a model keeps keys for later calls, by its arguments and its configuration."""
    keeps = kwargs.get("use_cache")
    if keeps is None:
        keeps = getattr(model.config, "use_cache", False)
    if not keeps or not model.training:
        return bool(keeps)
    return not any(getattr(part, "gradient_checkpointing", False) for part in model.modules())


def _shifts_labels(model: Any) -> bool:
    """Return whether the loss of a model is that of the next token, and takes labels that are shifted already."""
    return "shift_labels" in inspect.signature(model.loss_function).parameters


def _mask(
    row: SequenceRow,
    *,
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    q_length: int | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    device: Any = "cpu",
    **others: Any,
) -> Tensor | None:
    """Return the mask of the queries of this process over all keys; None: it is that of the attention's own.

    The arguments are those that transformers gives its functions of masks. Former versions tell no number of queries.
    """
    # Other masks than a causal one, a window and padding may not be left out.
    is_plain = others.get("allow_is_causal_skip", True) or others.get("allow_is_bidirectional_skip", False)
    are_parts = kv_length == row.part_length and q_length in (None, row.part_length)
    if others.get("use_vmap", False) or not is_plain or not are_parts:
        raise StepError(
            "A model of transformers has a mask of its own, or keys of earlier calls, which cannot be made for a part"
            " of a sequence. Leave FSDPStrategy(context=...) out."
        )
    # 1. The keys of all processes that are no padding.
    tokens = None
    if attention_mask is not None and row.has_padding:
        tokens = row.gather(attention_mask, 1)
        if bool(tokens.all()):
            tokens = None
    has_window = local_size is not None and local_size <= row.length
    if tokens is None and not has_window and row.sequences is None:
        return None

    # 2. The rule of the model, for the positions in the whole sequence.
    samples = torch.arange(batch_size, device=device)[:, None, None, None]
    queries = row.positions(torch.device(device))[:, None]
    keys = torch.arange(row.length, device=device)
    mask = mask_function(samples, torch.zeros_like(samples), queries, keys)

    # 3. What hides further keys.
    if tokens is not None:
        mask = mask & tokens[:, None, None]
    if row.sequences is not None:
        of_keys = row.sequences[:, None]
        mask = mask & (row.own_part(of_keys, 2)[..., None] == of_keys[:, :, None])
    return mask.expand(batch_size, 1, row.part_length, row.length)
