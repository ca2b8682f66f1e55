"""Dropout left out for the time of a comparison: a cut layer draws numbers for its part, and a whole one for all."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["DROPOUTS", "without_dropout"]

_F = nn.functional
# Functions that return their input if they drop nothing.
DROPOUTS = {
    _F.dropout,
    _F.dropout1d,
    _F.dropout2d,
    _F.dropout3d,
    _F.alpha_dropout,
    _F.feature_alpha_dropout,
    torch.dropout,
}


class _WithoutDropout(TorchFunctionMode):
    """Lets the functions of torch drop nothing.

    Attributes:
        shapes: Shapes of tensors of which elements would be dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            return self._keep(*args, **kwargs)
        if func is _F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is _F.multi_head_attention_forward:
            # Its layers are packed, so they are whole.
            call = inspect.signature(func).bind(*args, **kwargs)
            call.arguments["dropout_p"] = 0.0
            return func(*call.args, **call.kwargs)
        return func(*args, **kwargs)

    def _keep(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool = True
    ) -> Tensor:
        if p and training and train:
            self.shapes.append(input.shape)
        return input

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if dropout_p:
            self.shapes.append(query.shape)
        return _F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, *args, **kwargs)


@contextmanager
def without_dropout() -> Iterator[list[torch.Size]]:
    """Leave dropout out of forwards in a `with` block of this thread.

    Yields:
        A list that receives the shapes of tensors that would lose elements; of attention, those of the queries.

    Example:
        >>> with without_dropout() as shapes:
        ...     nn.Dropout(0.5)(torch.ones(2))
        tensor([1., 1.])
        >>> shapes
        [torch.Size([2])]
    """
    with _WithoutDropout() as mode:
        yield mode.shapes
