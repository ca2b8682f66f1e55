"""Private names of torch's `vmap`, which computes a function for each row of its arguments at once.

Each name stands here with the reason why nothing public does; a test notices when one of them changes.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

# `torch.vmap` flattens arguments, dimensions and results as nested structures in each call, which costs as much as the
# operations of a small network. These are the steps that it takes between.
from torch._C._functorch import (
    _add_batch_dim,
    _remove_batch_dim,
    _vmap_decrement_nesting,
    _vmap_increment_nesting,
)

__all__ = ["compute_batched"]


def compute_batched(
    function: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor],
    dims: Sequence[int | None],
    size: int,
    randomness: str,
) -> list[Tensor]:
    """Compute a function for each row of tensors at once, as `torch.vmap` does.

    Args:
        function: Takes and returns a list of tensors.
        tensors: Its arguments.
        dims: The dimension of the rows of each argument; None: all rows have the same value.
        size: The number of rows.
        randomness: "error" or "different", as for `torch.vmap`.

    Returns:
        The results, whose first dimension is that of the rows.
    """
    level = _vmap_increment_nesting(size, randomness)
    try:
        batched = []
        for tensor, dim in zip(tensors, dims, strict=True):
            if dim is not None:
                tensor = _add_batch_dim(tensor, dim, level)
            batched.append(tensor)
        results = function(batched)
        return [_remove_batch_dim(result, level, size, 0) for result in results]
    finally:
        _vmap_decrement_nesting()
