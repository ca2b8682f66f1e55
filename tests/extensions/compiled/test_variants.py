"""Which batches are compiled."""

from collections import namedtuple
from typing import Any

import pytest
import torch

from equipoise.extensions.compiled import variants
from equipoise.extensions.compiled.variants import STEPS_BEFORE, Variants, shape_of
from equipoise.extensions.compiled.ways import Compiling

Pair = namedtuple("Pair", "x y")


class Program:
    """Stands in for the program of a step, which nobody calls here."""

    own_attributes = ()

    def compute(self, *args: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: {"x": torch.ones(rows, 2), "name": "a"},
        lambda rows: [torch.ones(3), {"x": [torch.ones(rows)]}],
        lambda rows: Pair(torch.ones(rows), torch.ones(2)),
    ],
)
def test_batches_are_told_apart_by_the_shapes_of_their_tensors(make: Any) -> None:
    assert shape_of(make(3)) == shape_of(make(3))
    assert shape_of(make(3)) != shape_of(make(4))
    hash(shape_of(make(3)))


def test_shapes_that_never_come_again_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_MOST_COUNTS", 5)
    of_program = Variants(Program())  # type: ignore[arg-type]
    for rows in range(1, 50):
        assert of_program.of(torch.ones(rows), True) is None
        assert len(of_program._seen) <= 5
    for _ in range(STEPS_BEFORE):
        assert of_program.of(torch.ones(7), True) is None
    assert of_program.of(torch.ones(7), True) is not None


def test_a_variant_has_a_limited_number_of_trials() -> None:
    variant = variants.Variant(Compiling().function(Program()))  # type: ignore[arg-type]
    assert [variant.begin_trial() for _ in range(5)] == [True] * 4 + [False]
    variant = variants.Variant(Compiling().function(Program()))  # type: ignore[arg-type]
    allowed = []
    for _ in range(9):
        allowed.append(variant.begin_trial())
        variant.note_use()
    assert allowed == [True] * 8 + [False]
