"""Errors that come up while an entry of a checkpoint is loaded; `test_bad_checkpoint` names damaged entries."""

import pytest

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.trainer.checkpointing import entry_checks as checks


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
