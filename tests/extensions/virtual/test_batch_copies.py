"""Copies of batches lie in memory as the batches do."""

import threading

import pytest
import torch

from equipoise.errors import StepError
from equipoise.extensions.virtual.by_hand.batch_copies import packed_parts, unpacked_parts
from equipoise.extensions.virtual.parts.part_batches import Part

REASON = "Batches are sent.", "leave it out"


def test_copies_lie_in_memory_as_their_tensors() -> None:
    numbers = torch.arange(40.0)
    tensors = [numbers[3:7], numbers.view(5, 8)[1:, 2:5], numbers[2].expand(3, 4), numbers[5], numbers[:0]]
    tensors += [numbers.view(8, 5).t(), torch.randn(3, dtype=torch.cfloat).conj(), numbers.to_sparse(), numbers > 3]
    parts = unpacked_parts(
        packed_parts({6: Part({"x": [*tensors], "text": "a"}, 3, ("key",))}, *REASON), [torch.device("cpu")]
    )
    batch = parts[6].batch
    assert (batch["text"], *parts[6][1:]) == ("a", 3, ("key",), 0)
    for tensor, copied in zip(tensors, batch["x"], strict=True):
        assert torch.equal(copied.to_dense(), tensor.to_dense())
        if tensor.layout is torch.strided and tensor.numel() and not tensor.is_conj():
            assert copied.stride() == tensor.stride()
            assert copied.data_ptr() % 64 == tensor.data_ptr() % 64


def test_copies_overlap_as_their_tensors() -> None:
    """Also those of other dtypes; a tensor that is there twice is one; those that do not overlap are sent alone."""
    numbers = torch.zeros(100_000)
    pair = torch.zeros(2, dtype=torch.complex128)
    tensors = [
        numbers[17:20],
        numbers[18:23],
        numbers[99_990:],
        pair,
        torch.view_as_real(pair)[1],
        pair.view(torch.uint8),
    ]
    content = packed_parts({0: Part([*tensors, numbers[17:20], tensors[1], tensors[2].to_sparse()], 1)}, *REASON)
    assert len(content) < 4000
    first, second, far, one, real, raw, again, same, _ = unpacked_parts(content, [torch.device("cpu")])[0].batch
    assert same is second
    second[0] = 1
    assert first.tolist() == again.tolist() == [0, 1, 0]
    one[1] = 2 + 3j
    assert real.tolist() == [2, 3]
    assert torch.equal(raw, one.view(torch.uint8))
    assert not far.any()


def test_what_is_refused() -> None:
    with pytest.raises(StepError, match="cannot be pickled"):
        packed_parts({0: Part([torch.ones(2), threading.Lock()], 2)}, *REASON)
