"""Tensors of all layouts become bytes, and tensors again."""

import pytest
import torch
from torch import Tensor

from equipoise.extensions.pipeline.messaging.tensor_memory import bytes_of, kind_of, size_of, split_body, tensor_of


def odd(shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    """Return random values with these strides."""
    return torch.empty_strided(shape, strides).copy_(torch.randn(shape))


KEPT = {
    "contiguous": lambda: torch.randn(2, 3),
    "scalar": lambda: torch.tensor(1.5),
    "transposed": lambda: torch.randn(2, 3).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one sample": lambda: odd((1, 4, 4, 16), (16, 4, 1, 16)),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "requires gradient": lambda: torch.randn(3, 2).t().requires_grad_(),
    "complex": lambda: torch.randn(3, 2, dtype=torch.complex64).t(),
}
COPIED = {
    "with gaps": lambda: torch.randn(4, 6)[::2, ::3],
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "overlapping": lambda: torch.randn(6).as_strided((3, 3), (1, 1)),
    "conjugated, transposed": lambda: torch.randn(3, 2, dtype=torch.complex64).t().conj(),
    "conjugated": lambda: torch.randn(3, 2, dtype=torch.complex64).conj(),
    "empty": lambda: torch.empty(0, 3).t(),
}


@pytest.mark.parametrize("name", [*KEPT, *COPIED])
def test_values_come_back(name: str) -> None:
    tensor = {**KEPT, **COPIED}[name]()
    kind = kind_of(tensor)
    memory = bytes_of(tensor)
    assert len(memory) == size_of(kind)
    found = tensor_of(memory.clone(), kind)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    assert found.requires_grad == tensor.requires_grad
    assert found.is_leaf
    if name in KEPT:
        assert found.stride() == tensor.stride()
        # The values are not copied before they are sent.
        assert memory.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_several_in_one_message() -> None:
    tensors = [make() for make in {**KEPT, **COPIED}.values()]
    body = torch.cat([bytes_of(tensor) for tensor in tensors])
    for found, tensor in zip(split_body(body, [kind_of(tensor) for tensor in tensors]), tensors, strict=True):
        assert torch.equal(found, tensor)
