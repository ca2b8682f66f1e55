"""Uses of a stand-in: keeping, copying and comparing it by identity; every other one is an error with a remedy."""

import copy
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from equipoise import CheckpointError
from equipoise.safe_loading.stand_in import StandIn

BINARY: list[Callable[[Any, Any], Any]] = [
    *(operator.add, operator.sub, operator.mul, operator.matmul, operator.truediv, operator.floordiv, operator.mod),
    *(operator.pow, operator.lshift, operator.rshift, operator.and_, operator.or_, operator.xor, divmod),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.iadd),
]
UNARY: list[Callable[[Any], Any]] = [
    *(abs, bool, bytes, complex, float, hex, int, len, iter, next, reversed, round, list, operator.index),
    *(operator.neg, operator.pos, operator.invert, math.trunc, math.floor, math.ceil),
    *(lambda value: value(), lambda value: value[0], lambda value: 0 in value, lambda value: value.attribute),
    *(lambda value: isinstance(0, value), lambda value: issubclass(int, value)),
    *(lambda value: setattr(value, "attribute", 0), lambda value: delattr(value, "attribute")),
]


def with_block(value: Any) -> None:
    with value:
        pass


@pytest.mark.parametrize("use", [*UNARY, with_block])
def test_a_use_is_an_error_that_names_the_remedy(use: Callable[[Any], Any]) -> None:
    with pytest.raises(CheckpointError, match=r"object of somewhere\.Thing, .* pass weights_only=False"):
        use(StandIn("somewhere", "Thing"))


@pytest.mark.parametrize("use", BINARY)
def test_an_operator_is_an_error_on_both_sides(use: Callable[[Any, Any], Any]) -> None:
    for pair in [(StandIn("somewhere", "Thing"), 2), (2, StandIn("somewhere", "Thing"))]:
        with pytest.raises(CheckpointError, match=r"object of somewhere\.Thing"):
            use(*pair)


def test_it_can_be_kept() -> None:
    value = StandIn("somewhere", "Thing")
    assert copy.copy(value) is value
    assert copy.deepcopy([value]) == [value]
    assert repr(pickle.loads(pickle.dumps(value))) == "<stand-in for somewhere.Thing>"
    assert {value: 1}[value] == 1
    assert value != StandIn("somewhere", "Thing")
