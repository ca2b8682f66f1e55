"""A digest stands for the bits of a tensor: of any kind and memory, at any place, in any company."""

import random

import pytest
import torch
from torch import Tensor

from equipoise.parallel.divergence import digests
from equipoise.parallel.divergence.digests import digests_of, has_digest

DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.uint8, torch.bool]


def digest(tensor: Tensor) -> int:
    return int(digests_of([tensor]))


def drawn(dtype: torch.dtype, *shape: int) -> Tensor:
    count = torch.empty(shape, dtype=dtype).element_size() * torch.Size(shape).numel()
    if dtype is torch.bool:
        return torch.rand(shape) < 0.5
    return torch.randint(256, (count,), dtype=torch.uint8).view(dtype).view(shape)  # bits of any kind, also NaN


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_CHUNK_ON_CPU", 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.bool], ids=str)
def test_each_element_changes_the_digest(dtype: torch.dtype) -> None:
    tensor = drawn(dtype, 3, 7)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    for place in range(tensor.numel()):
        content = tensor.clone().view(-1).view(torch.uint8)
        width = len(content) // tensor.numel()
        content[place * width] ^= 1  # the last bit of most
        assert digest(content.view(dtype).view(3, 7)) != before


@pytest.mark.usefixtures("small_chunks")
def test_the_company_of_a_tensor_changes_nothing_but_is_part_of_the_layout() -> None:
    """Chunks of 64 bytes: tensors share one, or have several; the same ones always give the same numbers."""
    print("seed:", seed := random.randrange(10**6))
    torch.manual_seed(seed)
    shapes = [torch.Size([random.randrange(40)]) for _ in range(30)]
    tensors = [drawn(random.choice(DTYPES), *shape) for shape in shapes]
    before = digests_of(tensors)
    assert torch.equal(digests_of([tensor.clone() for tensor in tensors]), before)
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            changed = [*tensors[:number], drawn(tensor.dtype, *tensor.shape), *tensors[number + 1 :]]
            if not torch.equal(changed[number].view(torch.uint8), tensor.view(torch.uint8)):
                assert (digests_of(changed) != before).nonzero().flatten().tolist() == [number]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: -tensor,  # the highest bit alone, in an even number of places
        lambda tensor: tensor.flip(0),
        lambda tensor: tensor.roll(8),  # whole chunks trade places
        lambda tensor: tensor.roll(1),
        lambda tensor: tensor * (1 + 2**-52),
        lambda tensor: tensor.nan_to_num().fill_(float("nan")),
    ],
)
def test_changes_of_all_elements_do_not_cancel_out(change: object) -> None:
    tensor = torch.randn(64, dtype=torch.float64)
    assert callable(change)
    assert digest(change(tensor)) != digest(tensor)


def test_the_memory_format_does_not_change_the_digest() -> None:
    tensor = torch.randn(4, 3, 5, 5)
    assert digest(tensor.to(memory_format=torch.channels_last)) == digest(tensor)
    values = torch.randn(3, dtype=torch.complex64)
    assert digest(values.conj()) == digest(values.conj().resolve_conj()) != digest(values)


def test_tensors_without_elements_or_dense_memory() -> None:
    assert digests_of([]).tolist() == []
    assert digests_of([torch.ones(0), torch.ones(()), torch.ones(2, 0)]).bool().tolist() == [False, True, False]
    sparse = torch.eye(2).to_sparse()
    assert [has_digest(tensor) for tensor in (sparse, torch.empty(1, device="meta"), torch.ones(()))] == [
        False,
        False,
        True,
    ]
