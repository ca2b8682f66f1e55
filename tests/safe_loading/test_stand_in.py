"""Uses of a stand-in: keeping, copying and comparing it by identity; every other one is an error with a remedy."""

import copy
import itertools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from equipoise import CheckpointError
from equipoise.safe_loading.stand_in import StandIn

THING = StandIn("somewhere", "Thing")

BINARY: list[Callable[[Any, Any], Any]] = [operator.add, operator.matmul, divmod, operator.lt, operator.ge]
UNARY: list[Callable[[Any], Any]] = [
    *(abs, bool, bytes, int, len, iter, next, operator.index, operator.neg, round),
    *(lambda value: value(), lambda value: value[0], lambda value: 0 in value, lambda value: value.attribute),
    *(lambda value: isinstance(0, value), lambda value: issubclass(int, value)),
    *(lambda value: setattr(value, "attribute", 0), lambda value: delattr(value, "attribute")),
]


def test_a_use_is_an_error_that_names_the_remedy() -> None:
    for use in UNARY:
        with pytest.raises(CheckpointError, match=r"object of somewhere\.Thing, .* pass weights_only=False"):
            use(THING)


def test_an_operator_is_an_error_on_both_sides() -> None:
    for use, pair in itertools.product(BINARY, [(THING, 2), (2, THING)]):
        with pytest.raises(CheckpointError, match=r"object of somewhere\.Thing"):
            use(*pair)


def test_a_stand_in_can_be_kept_copied_and_compared() -> None:
    assert copy.copy(THING) is THING
    assert copy.deepcopy([THING]) == [THING]
    assert repr(pickle.loads(pickle.dumps(THING))) == "<stand-in for somewhere.Thing>"
    assert {THING: 1}[THING] == 1
    assert StandIn("somewhere", "Thing") != THING
