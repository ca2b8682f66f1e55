"""A module with tensors of every kind, and what weights are compared by."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tests.support.equality import assert_equal

__all__ = ["assert_same", "module_of_all_kinds"]

_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn),
    *(torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool),
)


def module_of_all_kinds(seed: int = 0) -> nn.Module:
    """Return nested modules with buffers of each dtype in each layout, views of one storage and tied tensors."""
    generator = torch.Generator().manual_seed(seed)
    root = nn.ModuleDict({"a": nn.Module(), "ü": nn.Module()})
    for dtype in _DTYPES:
        values = (10 * torch.randn(3, 4, generator=generator)).to(dtype)
        layouts = {
            "plain": values,
            "transposed": values.clone().T,
            "strided": values.clone()[::2],
            "expanded": values[0].clone().expand(2, 4),
            "scalar": values[0, 0].clone(),
            "empty": values[:0].clone(),
        }
        if dtype.is_complex:
            layouts["conjugated"] = values.clone().conj()
        for layout, value in layouts.items():
            root["a"].register_buffer(f"{layout}_{dtype}".replace("torch.", ""), value)
    flat = torch.randn(64, generator=generator)
    root["a"].register_buffer("view", flat[3:17])
    root["a"].register_buffer("format", flat[10:20])
    root["a"].weight = nn.Parameter(torch.randn(5, generator=generator))
    root["ü"].tied = root["a"].weight
    root["ü"].register_buffer("shared", root["a"].get_buffer("plain_int64"))
    return root


def assert_same(read: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert that weights have the same names, and are the same to the bit."""
    assert_equal(*({name: _plain(value) for name, value in each.items()} for each in (expected, read)))


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
