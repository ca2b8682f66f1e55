"""Models of transformers that receive parts of sequences: their masks, positions and labels."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from equipoise.interop.distributed.attention_of_models import OtherAttention, models_of_transformers

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
    signature = inspect.signature(model.forward)
    given = signature.bind_partial(*args, **kwargs).arguments
    inputs = given.get("input_ids")
    if inputs is None:
        inputs = given.get("inputs_embeds")
    if not row.is_divided or inputs is None or inputs.size(1) != row.part:
        return None
    kwargs = dict(kwargs)
    shape = inputs.shape[:2]
    takes = signature.parameters
    positions = given.get("position_ids")
    if "position_ids" in takes and positions is None:
        positions = row.positions(inputs.device).expand(shape)
        kwargs["position_ids"] = positions
    if "attention_mask" in takes and given.get("attention_mask") is None and positions is not None:
        # Where positions begin again, another sequence begins. Transformers would see one in each piece.
        begins = row.gather(positions.expand(shape), 1).diff(dim=1) != 1
        is_packed = bool(begins.any()) and not _keeps_keys(model, kwargs)
        row.sequences = nn.functional.pad(begins.cumsum(1), (1, 0)) if is_packed else None
        kwargs["attention_mask"] = torch.ones(shape, dtype=torch.int64, device=inputs.device)
    labels = given.get("labels")
    if labels is not None and kwargs.get("shift_labels") is None and _shifts_labels(model):
        shifted = nn.functional.pad(row.gather(labels, 1)[:, 1:], (0, 1), value=_IGNORED)
        kwargs["shift_labels"] = row.own_part(shifted, 1)
    return args, kwargs


def _keeps_keys(model: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a model keeps keys for later calls. Then it sees one sequence in each sample."""
    keeps = kwargs.get("use_cache")
    if keeps is None:
        keeps = getattr(model.config, "use_cache", False)
    is_recomputed = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    return bool(keeps) and not (is_recomputed and model.training)


def _shifts_labels(model: Any) -> bool:
    """Return whether the loss of a model is that of the next token, and takes labels that are shifted already."""
    return "shift_labels" in inspect.signature(model.loss_function).parameters


def _mask(
    row: SequenceRow,
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = "cpu",
    **others: Any,
) -> Tensor | None:
    """Return the mask of the queries of this process over all keys; None: it is that of the attention's own.

    Args:
        row: The processes that have parts of the sequences.
        batch_size: The number of samples.
        q_length: The number of queries.
        kv_length: The number of keys.
        mask_function: Tells whether a query sees a key, from numbers of the sample, the head and both positions.
        attention_mask: Which keys of this process are no padding; None: all.
        local_size: The number of keys that a query sees at most; None: any.
        allow_is_causal_skip: Whether later positions, the window and padding alone hide keys.
        allow_is_bidirectional_skip: Whether the window and padding alone hide keys.
        use_vmap: Whether the model adds a mask of its own.
        device: The device of the mask.
        others: Further arguments of transformers.
    """
    has_window = local_size is not None and local_size <= row.length
    may_skip = allow_is_causal_skip or allow_is_bidirectional_skip
    if use_vmap or not may_skip or q_length != row.part or kv_length != row.part:
        raise StepError(
            "A model of transformers has a mask of its own, or keys of earlier calls, which cannot be made for a part"
            " of a sequence. Leave FSDPStrategy(context=...) out."
        )
    padding = None
    if attention_mask is not None:
        whole = row.gather(attention_mask, 1)
        padding = None if bool(whole.all()) else whole
    if padding is None and not has_window and row.sequences is None:
        return None
    samples = torch.arange(batch_size, device=device)[:, None, None, None]
    queries = row.positions(torch.device(device))[:, None]
    keys = torch.arange(row.length, device=device)
    mask = mask_function(samples, torch.zeros_like(samples), queries, keys)
    if padding is not None:
        mask = mask & padding[:, None, None]
    if row.sequences is not None:
        numbers = row.sequences[:, None]
        mask = mask & (row.own_part(numbers, 2)[..., None] == numbers[:, :, None])
    return mask.expand(batch_size, 1, row.part, row.length)
