"""`nn.MultiheadAttention` over sequences that are divided over processes."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from equipoise.errors import StepError
from equipoise.extensions.fsdp.mesh.context.attention import attend_to_whole, mask_over_whole
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow

__all__ = ["attend_in_heads"]


def attend_in_heads(row: SequenceRow, arguments: dict[str, Any]) -> tuple[Tensor, None]:
    """Return what `multi_head_attention_forward` returns for whole sequences, at the positions of this process.

    Args:
        row: The processes that have parts of the sequence.
        arguments: The arguments of torch's function, by name.

    Returns:
        The output, and None in place of the weights.

    Raises:
        StepError: If keys are added that are no part of the sequence, or the mask is neither causal nor one of keys.
    """
    added = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")
    if any(arguments.get(name) not in (None, False) for name in added):
        raise StepError(
            "`nn.MultiheadAttention` with add_bias_kv=True or add_zero_attn=True adds keys to each part of a sequence."
            " Leave them out under FSDPStrategy(context=...)."
        )
    # 1. Queries, keys and values: (samples, heads, positions, channels).
    heads = arguments["num_heads"]
    if arguments.get("use_separate_proj_weight"):
        weights = [arguments[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = arguments["in_proj_weight"].chunk(3)
    biases: Any = [None] * 3
    if arguments.get("in_proj_bias") is not None:
        biases = arguments["in_proj_bias"].chunk(3)
    projected = []
    names = ("query", "key", "value")
    for name, weight, bias in zip(names, weights, biases, strict=True):
        flat = functional.linear(arguments[name], weight, bias)
        projected.append(flat.view(*flat.shape[:2], heads, -1).permute(1, 2, 0, 3))
    query, key, value = projected

    # 2. Attention to the keys of the whole sequence.
    is_causal, mask = _mask(row, arguments, query)
    key = row.gather(key, -2)
    value = row.gather(value, -2)
    dropout_p = arguments["dropout_p"]
    if not arguments.get("training", True):
        dropout_p = 0.0
    attended = attend_to_whole(
        row,
        query,
        key,
        value,
        mask,
        dropout_p,
        is_causal,
    )

    # 3. The output: (positions, samples, channels).
    joined = attended.permute(2, 0, 1, 3).flatten(2)
    return functional.linear(joined, arguments["out_proj_weight"], arguments["out_proj_bias"]), None


def _mask(row: SequenceRow, arguments: dict[str, Any], query: Tensor) -> tuple[bool, Tensor | None]:
    """Return whether later positions are hidden, and a mask over all keys."""
    # 1. The mask of queries and keys. The hint says what it is.
    is_causal = bool(arguments.get("is_causal"))
    of_pairs = arguments.get("attn_mask")
    mask: Tensor | None = None
    if of_pairs is not None and not is_causal:
        of_pairs = _inverted(of_pairs)
        if of_pairs.ndim == 3:
            # Torch has samples and heads in one dimension.
            samples, heads = query.shape[:2]
            of_pairs = of_pairs.view(samples, heads, *of_pairs.shape[1:])
        is_causal, mask = mask_over_whole(row, of_pairs)
    # 2. That of keys.
    of_keys = arguments.get("key_padding_mask")
    if of_keys is None:
        return is_causal, mask
    of_keys = _inverted(of_keys)
    of_all_keys = row.gather(of_keys, -1)
    of_all_keys = of_all_keys[:, None, None]
    if mask is None:
        return is_causal, of_all_keys
    both = _additive(mask, query) + _additive(of_all_keys, query)
    return is_causal, both


def _inverted(mask: Tensor) -> Tensor:
    """Return a mask as other functions of torch take it, in which what is true is seen."""
    if mask.dtype == torch.bool:
        return ~mask
    return mask


def _additive(mask: Tensor, query: Tensor) -> Tensor:
    """Return a mask that is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -torch.inf)
