"""Sizes of nested batches: found where all tensors agree, and never guessed."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.parallel.split import infer_batch_size, tensors_of

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Sample:
    inner: Any
    note: str = "x"
    derived: Any = field(default=None, init=False)


@dataclass(frozen=True)
class Frozen:
    inner: Any


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def wrap(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        keys = st.text(max_size=2)
        return st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(UserDict),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
            st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
            inner.map(Sample),
            inner.map(Frozen),
        )

    return st.recursive(leaves, wrap, max_leaves=10)


def tensors_of_size(size: int) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(st.integers(0, 3), max_size=2).map(lambda rest: torch.zeros(size, *rest))


others = st.none() | st.integers() | st.text(max_size=4) | st.just(torch.tensor(1.0)) | st.just(torch.nn.Linear(3, 2))


@settings(deadline=None)
@given(data=st.data(), size=st.integers(0, 5))
def test_the_size_that_all_tensors_share(data: st.DataObject, size: int) -> None:
    batch = data.draw(nested(tensors_of_size(size) | others))
    batched = [tensor for tensor in tensors_of(batch) if tensor.ndim]
    assert infer_batch_size(batch) == (size if batched else None)
    assert infer_batch_size((torch.zeros(size, 2), batch)) == size


@settings(deadline=None)
@given(data=st.data(), size=st.integers(0, 5), other=st.integers(0, 5))
def test_one_tensor_of_another_size_forbids_a_guess(data: st.DataObject, size: int, other: int) -> None:
    batch = data.draw(nested(tensors_of_size(size) | others))
    batch = data.draw(st.sampled_from([(batch, torch.zeros(other)), {"a": torch.zeros(other), "b": batch}]))
    batch = [Sample(batch), torch.zeros(size)]
    assert infer_batch_size(batch) == (size if size == other else None)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(4, 2), 4),
        (torch.tensor(1.0), None),
        ((torch.zeros(4, 2), torch.zeros(4)), 4),
        ([torch.zeros(4, 2), torch.zeros(4)], 4),
        ((torch.zeros(4, 2), torch.zeros(5)), None),
        ([torch.zeros(4, 2), torch.zeros(5)], None),
        ((torch.zeros(4, 2), torch.tensor(5.0)), 4),
        ((torch.tensor(5.0), torch.tensor(5.0)), None),
        (Pair(torch.zeros(3), torch.zeros(3)), 3),
        (Pair(torch.zeros(3), torch.zeros(2)), None),
        ((torch.nn.Parameter(torch.zeros(3)), torch.zeros(3)), 3),
        ([torch.zeros(3, 10, 12), torch.zeros(3, 8, 9)], 3),
        ([torch.zeros(10, 12), torch.zeros(8, 9), torch.zeros(7, 7)], None),  # a list of unequal images
        (UserDict(input_ids=torch.zeros(2, 7), attention_mask=torch.zeros(2, 7)), 2),
        (Sample(UserDict(a=[torch.zeros(2)])), 2),
        (Frozen(torch.zeros(2)), 2),
        (Sample, None),  # a class is no sample
        ((), None),
        ({}, None),
        (None, None),
        ("text", None),
        (torch.zeros(0, 3), 0),
        (torch.zeros(3).to_sparse(), 3),
    ],
)
def test_sizes(batch: Any, size: int | None) -> None:
    assert infer_batch_size(batch) == size


def test_a_field_made_after_construction_counts() -> None:
    sample = Sample(torch.zeros(2))
    sample.derived = torch.zeros(3)
    assert infer_batch_size(sample) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    ragged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(5), torch.zeros(1)], layout=layout)
    assert infer_batch_size(ragged) == 3
    assert infer_batch_size((ragged, torch.zeros(3))) == 3
    assert infer_batch_size({"a": ragged, "b": torch.zeros(4)}) is None


def test_tensors_come_in_order() -> None:
    a, b, c, d, e = (torch.zeros(1) for _ in range(5))
    batch = [a, {"x": Pair(b, "text"), "y": UserDict(z=(c,))}, Sample(d), None, 3, e]
    assert [id(t) for t in tensors_of(batch)] == [id(t) for t in (a, b, c, d, e)]
