"""A tensor that wraps another, as libraries such as torchao keep an optimiser's state of few bits."""

from typing import Any

import torch
from torch import Tensor

from equipoise.interop.torch.dispatch import empty_wrapper

__all__ = ["Rounded"]


class Rounded(Tensor):
    """Shows the dtype of a parameter, and keeps values in bfloat16."""

    @staticmethod
    def __new__(cls, codes: Tensor, dtype: torch.dtype) -> Any:
        return empty_wrapper(cls, dtype, codes.shape, codes.stride())

    def __init__(self, codes: Tensor, dtype: torch.dtype) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            return cls(args[0].codes.clone(), args[0].dtype)
        raise NotImplementedError(str(func))
