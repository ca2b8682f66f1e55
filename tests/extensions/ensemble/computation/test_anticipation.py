"""The way in which calls follow from batches."""

from typing import Any

import pytest
import torch
from torch import Tensor

from equipoise.extensions.ensemble.computation.anticipation import Anticipation, is_same_call, pattern_of
from equipoise.extensions.ensemble.computation.batched_call import Call
from equipoise.tree import extract_tensors


def batches(members: int = 2) -> list[list[Tensor]]:
    return [[torch.rand(4, 3), torch.rand(4)] for _ in range(members)]


def test_a_call_of_tensors_of_the_batch_has_a_pattern() -> None:
    present = batches()
    calls: list[Call] = [((batch[1],), {"features": [batch[0]], "factor": 2.0}) for batch in present]
    pattern = pattern_of("net", calls, present)
    assert pattern is not None
    assert pattern.sources == (1, 0)
    following = batches()
    columns = pattern.tensors(following)
    assert columns is not None
    for column, batch in zip(columns, following, strict=True):
        assert column[0] is batch[1]
        assert column[1] is batch[0]


def test_batches_with_fewer_tensors_do_not_fit_a_pattern() -> None:
    present = batches()
    pattern = pattern_of("net", [((batch[1],), {}) for batch in present], present)
    assert pattern is not None
    assert pattern.tensors([[torch.rand(4, 3)]] * 2) is None


@pytest.mark.parametrize(
    "calls_of",
    [
        # A tensor that the step has computed.
        lambda first, second: [((first[0] * 2,), {}), ((second[0],), {})],
        # Members that pass different tensors, different values, or values in different places.
        lambda first, second: [((first[0],), {}), ((second[1],), {})],
        lambda first, second: [((first[0], 1.0), {}), ((second[0], 2.0), {})],
        lambda first, second: [((first[0], 1.0), {}), ((second[0],), {"factor": 1.0})],
    ],
)
def test_other_calls_have_none(calls_of: Any) -> None:
    first, second = batches()
    assert pattern_of("net", calls_of(first, second), [first, second]) is None


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        (lambda tensor, other: ((tensor, [1, "mean"]), {"mask": {"rows": other}}), True),
        # Tensors that are equal, and not the same.
        (lambda tensor, other: ((tensor.clone(), [1, "mean"]), {"mask": {"rows": other}}), False),
        (lambda tensor, other: ((other, [1, "mean"]), {"mask": {"rows": tensor}}), False),
        # Values of another type or number, or under another name.
        (lambda tensor, other: ((tensor, [2, "mean"]), {"mask": {"rows": other}}), False),
        (lambda tensor, other: ((tensor, (1, "mean")), {"mask": {"rows": other}}), False),
        (lambda tensor, other: ((tensor, [1]), {"mask": {"rows": other}}), False),
        (lambda tensor, other: ((tensor, [1, "mean"]), {"mask": {"columns": other}}), False),
        (lambda tensor, other: ((tensor, [1, "mean"]), {"mask": {"rows": None}}), False),
        (lambda tensor, other: ((tensor, [1, tensor]), {"mask": {"rows": other}}), False),
        (lambda tensor, other: ((None, [1, "mean"]), {"mask": {"rows": other}}), False),
    ],
)
def test_a_call_is_compared_with_the_anticipated_one(change: Any, is_same: bool) -> None:
    tensor, other = torch.rand(3), torch.rand(3)
    call = ((tensor, [1, "mean"]), {"mask": {"rows": other}})
    tree, tensors = extract_tensors(call)
    assert is_same_call(change(tensor, other), tree, tensors) is is_same


def test_trust_needs_agreements_and_ends_after_failures() -> None:
    anticipation = Anticipation()
    present = batches()
    calls: list[Call] = [((batch[0],), {}) for batch in present]
    anticipation.observe([("net", calls), ("net", calls)], present)
    assert anticipation.pattern is None
    for _ in range(2):
        assert not anticipation.is_trusted
        anticipation.observe([("net", calls)], present)
        assert anticipation.pattern is not None
        anticipation.agree()
    assert anticipation.is_trusted
    for _ in range(3):
        anticipation.fail()
        assert not anticipation.is_trusted
    anticipation.observe([("net", calls)], present)
    assert anticipation.pattern is None
