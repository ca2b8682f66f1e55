"""Outputs of the parts of a batch are joined to the output of the whole batch."""

from collections import UserDict
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from equipoise.errors import StepError
from equipoise.parallel.batches.gathering import gather
from equipoise.parallel.batches.splitting import split
from equipoise.parallel.batches.weighting import Weight
from equipoise.parallel.step_protocols import PartialOutputs
from tests.support.equality import assert_equal
from tests.support.nested import Frozen, Pair
from tests.support.nested_batches import nested
from tests.support.trainer_runs import refuses

CPU = torch.device("cpu")


class Table:
    """Compares its items, as an array or a table does."""

    def __eq__(self, other: object) -> Any:
        raise ValueError("The truth value is ambiguous.")

    __hash__ = None


@cache  # hypothesis takes a while for each new strategy
def outputs_of(size: int, dim: int) -> st.SearchStrategy[Any]:
    """Nested outputs of so many samples."""
    tensors = st.integers(0, 3).map(lambda rest: torch.rand((size, rest) if dim == 0 else (rest, size)))
    return nested(tensors | st.none() | st.text("ab", max_size=3) | st.booleans(), lists=False)


# The order of the data


@pytest.mark.thorough
@settings(deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4), dim=st.integers(0, 1))
def test_what_was_cut_comes_together_again(data: st.DataObject, sizes: list[int], dim: int) -> None:
    whole = data.draw(outputs_of(sum(sizes), dim))
    weights = data.draw(st.none() | st.just(sizes))
    assert_equal(whole, gather(split(whole, sizes, dim), sizes, CPU, dim=dim, weights=weights))


def test_lists_with_an_item_a_sample_are_joined() -> None:
    boxes = [{"boxes": torch.rand(n, 4), "labels": torch.arange(n)} for n in (2, 0, 5, 1)]
    for first in (1, 2):
        assert_equal(boxes, gather([boxes[:first], boxes[first:]], [first, 4 - first], CPU))
    # Lists of tensors of all samples would have one length.
    rows = [torch.rand(1), torch.rand(2), torch.rand(2)]
    assert_equal(UserDict(a=rows), gather([UserDict(a=rows[:1]), UserDict(a=rows[1:])], [1, 2], CPU))
    assert gather([["a", "b"], ["c"]], [2, 1], CPU) == ["a", "b", "c"]


def test_lists_of_tensors_of_all_samples_stay_lists() -> None:
    """Also where there are as many tensors as samples in each part."""
    whole = [torch.rand(4, 3), torch.rand(4)]
    assert_equal(whole, gather(split(whole, [2, 2]), [2, 2], CPU))
    assert_equal(whole, gather(split(whole, [3, 1]), [3, 1], CPU))


def test_vectors_are_joined_though_samples_lie_along_the_second_dimension() -> None:
    scores = [torch.rand(1), torch.rand(4)]
    assert_equal(torch.cat(scores), gather(scores, [1, 4], CPU, dim=1))


def test_arrays_are_joined() -> None:
    whole = np.arange(12.0).reshape(6, 2)
    parts = [{"scores": whole[:1]}, {"scores": whole[1:2]}, {"scores": whole[2:]}]
    for weights in (None, [1, 1, 4]):
        gathered = gather(parts, [1, 1, 4], CPU, weights=weights)["scores"]
        assert gathered.tolist() == whole.tolist()
    assert gather([whole.T[:, :4], whole.T[:, 4:]], [4, 2], CPU, dim=1).tolist() == whole.T.tolist()
    assert gather([np.ones(1), np.ones(1)], [1, 1], CPU).tolist() == [1, 1]  # equal, and yet of two samples
    assert gather([np.array(1.0), np.array(2.0)], [1, 1], CPU).tolist() == [1, 2]
    assert gather([whole], [6], CPU) is whole


def test_the_output_of_one_part_is_returned_as_it_is() -> None:
    whole = {"a": torch.rand(3), "b": torch.tensor(2.0), "c": [torch.rand(3)], "d": 1, "e": 0.1}
    for weights in (None, [3]):
        gathered = gather([whole], [3], CPU, weights=weights)
        assert_equal(whole, gathered)
        assert gathered["a"] is whole["a"]


# Values of a whole part


def pair(dtype: torch.dtype) -> list[Tensor]:
    """Values 1 and 5."""
    return [torch.tensor(1, dtype=dtype), torch.tensor(5, dtype=dtype)]


def summed(dtype: torch.dtype, together: int) -> tuple[Sequence[Any], Any, Any]:
    return pair(dtype), torch.tensor(together, dtype=dtype), torch.tensor([1, 5], dtype=dtype)


SCALARS: dict[str, tuple[Sequence[Any], Any, Any]] = {  # with weights 1 and 3, and without
    "means": summed(torch.float32, 4),
    "counts": summed(torch.int64, 6),
    "small counts": summed(torch.int32, 6),
    "answers": ([torch.tensor(True), torch.tensor(False)], torch.tensor([True, False]), torch.tensor([True, False])),
    "floats": ([1.0, 5.0], 4.0, [1.0, 5.0]),
    "equal floats": ([0.1, 0.1], 0.1, 0.1),
    "integers": ([1, 5], 6, [1, 5]),
    "equal integers": ([2, 2], 4, 2),
    "booleans": ([True, True], True, True),
    "a float and an integer": ([1.0, 1], [1.0, 1], [1.0, 1]),
    "text": (["a", "a"], "a", "a"),
    "nothing and text": ([None, "a"], [None, "a"], [None, "a"]),
}


@pytest.mark.parametrize("case", SCALARS)
def test_numbers_are_averaged_by_weight_counts_added_and_others_listed(case: str) -> None:
    values, weighted, stacked = SCALARS[case]
    assert_equal(weighted, gather(values, [1, 3], CPU, weights=[1, 3]))
    assert_equal(stacked, gather(values, [1, 3], CPU))
    nested_values = [{"a": (value,)} for value in values]
    assert_equal({"a": (weighted,)}, gather(nested_values, [1, 3], CPU, weights=[1, 3]))


def test_means_by_weights_of_every_kind() -> None:
    values = [torch.tensor(1.0), torch.tensor(5.0)]
    weights: list[Weight] = [0.5, torch.tensor(1.5)]
    assert float(gather(values, [1, 1], CPU, weights=weights)) == 4
    assert float(gather([1.0, 5.0], [1, 1], CPU, weights=weights)) == 4
    assert float(gather(values, [1, 1], CPU, weights=[0, 2])) == 5
    assert float(gather(values, [1, 1], CPU, weights=[0, 0])) == 1  # no mean: any


def test_what_cannot_be_compared_is_listed() -> None:
    one, other = Table(), Table()
    assert gather([one, one], [1, 1], CPU) is one
    gathered = gather([one, other], [1, 1], CPU)
    assert gathered[0] is one
    assert gathered[1] is other


# Different structures

DIFFERENT: dict[str, tuple[Sequence[Any], list[str]]] = {
    "tensor and mapping": (
        [torch.zeros(2), {"loss": 1}],
        ["structures: part 1: a tensor of shape [2]; part 2: a dict with keys ['loss']."],
    ),
    "dimensions": ([torch.zeros(2), torch.tensor(1.0)], ["part 2: a tensor of shape []"]),
    "lengths": ([(1, 2, 3), (1, 2)], ["part 1: a tuple of length 3; part 2: a tuple of length 2"]),
    "kinds": ([[(1, 2)], [[1, 2]]], ["structures at [0]: ", "part 2: a list of length 2"]),
    "records": ([Frozen(Frozen(1)), Frozen(Pair(1, 2))], ["structures at .inner: part 1: Frozen; part 2: a Pair"]),
    "arrays": ([np.zeros(2), np.zeros((2, 2))], ["part 1: ndarray; part 2: ndarray"]),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_structures_are_refused(case: str) -> None:
    outputs, expected = DIFFERENT[case]
    beginning, remedy = (
        "The parts of a batch returned different structures",
        "return the same structure for every part.",
    )
    refuses(lambda: gather(outputs, [3, 3], CPU, weights=[3, 3]), beginning, *expected, remedy, error=StepError)


# Outputs that wait until somebody asks


def test_parts_that_were_skipped_are_left_out() -> None:
    """A training step may return None for a part, which then weighs nothing."""
    losses = [None, torch.tensor(1.0), None, torch.tensor(4.0)]
    assert PartialOutputs(losses, [1, 2, 3, 1], CPU, 0, [0, 2, 0, 1]).gathered() == 2
    for weights in ([0, 0], [1, 2]):
        assert PartialOutputs([None, None], [1, 2], CPU, 0, weights).gathered() is None
    with pytest.raises(StepError, match="part 1: NoneType"):
        PartialOutputs([None, torch.zeros(2)], [1, 2], CPU, 0, [1, 2]).gathered()


def test_tensors_are_gathered_where_they_are_wanted() -> None:
    """The meta device stands for any other."""
    parts = [{"a": torch.zeros(n, 2), "b": torch.tensor(1.0)} for n in (1, 3)]
    for weights in (None, [1, 3]):
        gathered = gather(parts, [1, 3], torch.device("meta"), weights=weights)
        assert {tensor.device.type for tensor in gathered.values()} == {"meta"}
        assert gathered["a"].shape == (4, 2)
