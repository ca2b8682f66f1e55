"""Checks of single entries of a checkpoint accept what a run writes, and name everything else."""

import re
from typing import Any

import pytest
import torch

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.trainer.checkpointing import entry_checks as checks

REFUSED = [
    (checks.count, -1, "place must be a non-negative integer, not -1"),
    (checks.positive_count, 0, "place must be a positive integer, not 0"),
    (checks.number_of_steps, torch.ones(2), "place must be a number of steps, not a Tensor"),
    (checks.number_of_steps, -1.0, "place must be a number of steps, not -1.0"),
    (checks.flag, 1, "place must be True or False, not 1"),
    (checks.mapping, [1], "place must be a dictionary, not a list"),
    (checks.named_entries, {1: 2}, "a key of place must be a text, not 1"),
    (checks.any_list, {}, "place must be a list, not a dict"),
    (checks.gradient, 0.5, "place must be a tensor, not 0.5"),
    (checks.random_state, {"torch": 1}, "place must be the states of random generators, not a dict"),
    ([checks.text], ["a", 2], "place[1] must be a text, not 2"),
    (checks.OrNone(checks.count), "x", "place must be a non-negative integer, not 'x'"),
    (checks.OrNone(checks.Whole({"a": checks.count})), {}, "place lacks 'a'"),
    (checks.OrEmpty(checks.Whole({"a": checks.count})), {"b": 1}, "place lacks 'a'"),
    (checks.OrEmpty(checks.mapping), torch.ones(2), "place must be a dictionary, not a Tensor"),
    (checks.Filled([checks.count]), [], "place must be a filled list, not a list"),
    (checks.Whole({"a": checks.count, "b": checks.OrMissing(checks.flag)}), {"c": 1}, "place lacks 'a'"),
]


@pytest.mark.parametrize(("kind", "value", "words"), REFUSED)
def test_other_values_are_named(kind: Any, value: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"The checkpoint is damaged: {words}")):
        checks.check(kind, value, "place")


class OfTheUser:
    """Owner of an entry."""


def test_an_error_of_a_class_of_the_user_is_raised_as_it_is() -> None:
    error = KeyError("mine")
    with pytest.raises(KeyError) as raised, checks.loading("x", OfTheUser()):
        raise error
    assert raised.value is error
    assert error.__notes__ == ["This happened while x of the checkpoint was loaded."]


@pytest.mark.parametrize("error", [CheckpointError("a"), ConfigurationError("b"), MemoryError("c")])
def test_errors_that_no_damage_causes_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, checks.loading("x"):
        raise error
    assert raised.value is error
