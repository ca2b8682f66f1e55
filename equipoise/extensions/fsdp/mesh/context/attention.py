"""Attention of the queries that a process has to the keys of whole sequences."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from equipoise.errors import StepError
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow

__all__ = ["attend", "attend_to_whole", "mask_over_whole"]


def attend(
    row: SequenceRow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Return `scaled_dot_product_attention` over the whole sequence, for the queries at positions of this process.

    Args:
        row: The processes that have parts of the sequence.
        query: Queries of this process; (..., positions, channels).
        key: Keys of this process. Those of another number of positions are no part of the sequence, and are whole.
        value: Values of this process.
        attn_mask: As for the function of torch, for the positions of this process, or for all keys.
        dropout_p: As for the function of torch.
        is_causal: As for the function of torch.
        options: Its further arguments.

    Raises:
        StepError: If the mask is neither causal nor one of keys.
    """
    if key.size(-2) != row.part_length:
        return scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None:
        is_causal, attn_mask = mask_over_whole(row, attn_mask)
    key = row.gather(key, -2)
    value = row.gather(value, -2)
    return attend_to_whole(row, query, key, value, attn_mask, dropout_p, is_causal, **options)


def attend_to_whole(
    row: SequenceRow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    **options: Any,
) -> Tensor:
    """Return the attention of the queries of this process to all keys.

    Args:
        row: The processes that have parts of the sequence.
        query: Queries of this process.
        key: Keys of the whole sequence.
        value: Values of the whole sequence.
        mask: Mask over all keys; None: each is seen.
        dropout_p: Probability with which an element is dropped.
        is_causal: Whether later keys are hidden as well.
        options: Further arguments of torch's function.
    """
    if not is_causal:
        return scaled_dot_product_attention(query, key, value, mask, dropout_p, **options)
    # Each piece sees the keys up to its own end.
    outputs = []
    piece = row.part_length // 2
    halves = query.chunk(2, -2)
    for number, half in zip(row.piece_numbers, halves, strict=True):
        end = (number + 1) * piece
        # Repetitions of the last position see what it sees.
        repeated = min(max(0, end - row.length), piece - 1)
        queries = half[..., : piece - repeated, :]
        keys = key[..., :end, :]
        output = _attend_to_earlier(queries, keys, value[..., :end, :], mask, dropout_p, **options)
        outputs.append(output)
        outputs.extend([output[..., -1:, :]] * repeated)
    return torch.cat(outputs, -2)


def _attend_to_earlier(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, dropout_p: float, **options: Any
) -> Tensor:
    """Return the attention of queries of which the last sees all keys, and each one before it a key fewer."""
    count = queries.size(-2)
    end = keys.size(-2)
    if mask is None and queries.is_cuda:
        # Kernels of GPUs need no mask in memory.
        lower_right: Tensor = causal_lower_right(count, end)
        return scaled_dot_product_attention(queries, keys, values, lower_right, dropout_p, **options)
    if mask is None:
        # From the last query to the first, each row of the mask begins one element later in the same memory.
        row = queries.new_zeros(count + end - 1)
        row[end:] = -torch.inf
        bias = row.as_strided((count, end), (1, 1))
        backwards = queries.flip(-2)
        return scaled_dot_product_attention(backwards, keys, values, bias, dropout_p, **options).flip(-2)
    triangle = torch.ones(count, end, dtype=torch.bool, device=queries.device).tril(end - count)
    visible = mask[..., :end]
    if visible.dtype == torch.bool:
        visible = triangle & visible
    else:
        # It is added to the scores.
        visible = torch.where(triangle, visible, -torch.inf)
    return scaled_dot_product_attention(queries, keys, values, visible, dropout_p, **options)


def mask_over_whole(row: SequenceRow, mask: Tensor) -> tuple[bool, Tensor | None]:
    """Return a flag, True if a mask hides later positions, and a mask over all keys; None: all keys are seen.

    Args:
        row: The processes that have parts of the sequence.
        mask: A mask for the keys of this process: for all queries alike, causal, or both. Or one for all keys, which is
            returned as it is. As for `scaled_dot_product_attention`.

    Raises:
        StepError: If it is another mask; in all processes of the row.
    """
    if mask.ndim == 1:
        mask = mask[None]
    queries, keys = mask.shape[-2:]
    if keys in (1, row.length):
        return False, mask
    if queries == 1:
        return False, row.gather(mask, -1)
    if keys != row.part_length or queries != row.part_length:
        raise StepError(_other_mask(row, mask))
    # 1. The keys that the last query sees. Under a causal mask they are all that any query sees.
    visible, is_plain = _as_truth(mask)
    of_last = visible[..., -1:, :]
    triangle = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    # 2. What the mask can be, in all processes alike.
    as_causal = (visible == (of_last & triangle)).all()
    as_of_keys = (visible == of_last).all()
    flags = torch.stack([as_causal, as_of_keys]) & is_plain
    is_causal, is_of_keys = row.all_true(flags)
    if not is_causal and not is_of_keys:
        raise StepError(_other_mask(row, mask))
    of_keys = row.gather(of_last, -1)
    if bool(of_keys.all()):
        return is_causal, None
    return is_causal, of_keys


def _as_truth(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return which keys are seen, and whether nothing else is in a mask, such as a bias of distances."""
    if mask.dtype == torch.bool:
        return mask, torch.ones((), dtype=torch.bool, device=mask.device)
    visible = mask == 0
    return visible, (visible | (mask <= torch.finfo(mask.dtype).min)).all()


def _other_mask(row: SequenceRow, mask: Tensor) -> str:
    return (
        f"Attention has a mask of shape {list(mask.shape)}, where each process has {row.part_length} of {row.length}"
        f" positions (context={row.size}). Such a mask can be causal, the same for all queries, or both. Give"
        " `scaled_dot_product_attention` any other one, such as a window or a bias of distances, for all keys:"
        " [..., positions of this process, all positions], made from `position_ids` of the batch."
    )
