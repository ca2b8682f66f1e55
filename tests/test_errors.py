"""Errors of Equipoise are also what programs for Lightning catch."""

import pickle

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from equipoise import CheckpointError, ConfigurationError, StepError, WorkerError
from equipoise.errors import CheckpointNotFoundError, ConfigurationRuntimeError, ConfigurationTypeError

KINDS = [ConfigurationError, ConfigurationTypeError, ConfigurationRuntimeError, StepError]


@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_error_is_also_a_misconfiguration_exception_of_lightning(kind: type[Exception]) -> None:
    with pytest.raises(MisconfigurationException, match="the rule") as caught:
        raise kind("the rule")
    assert isinstance(caught.value, kind)
    assert (type(caught.value).__name__, type(caught.value).__qualname__) == (kind.__name__, kind.__qualname__)


@pytest.mark.parametrize(
    ("kind", "standard"),
    [
        (ConfigurationError, ValueError),
        (ConfigurationTypeError, TypeError),
        (ConfigurationRuntimeError, RuntimeError),
        (StepError, RuntimeError),
        (CheckpointNotFoundError, RuntimeError),
        (CheckpointNotFoundError, FileNotFoundError),
    ],
)
def test_pythons_exception_class_catches_it(kind: type[Exception], standard: type[Exception]) -> None:
    with pytest.raises(standard):
        raise kind("the rule")


@pytest.mark.parametrize("kind", [CheckpointError, WorkerError])
def test_other_errors_are_no_misconfiguration(kind: type[Exception]) -> None:
    assert not isinstance(kind("lost"), MisconfigurationException)


@pytest.mark.parametrize("kind", [*KINDS, CheckpointNotFoundError])
def test_an_error_with_notes_is_pickled(kind: type[Exception]) -> None:
    error = kind("the rule", 3)
    error.add_note("a note")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.args == error.args
    assert copy.__notes__ == ["a note"]


class TwoArguments(ConfigurationError):
    """An error of a user's strategy."""

    def __init__(self, rule: str, *, value: int) -> None:
        super().__init__(f"{rule}: {value}")
        self.value = value


def test_a_subclass_of_an_error_may_have_other_arguments() -> None:
    with pytest.raises(MisconfigurationException, match="at most 2: 3"):
        raise TwoArguments("at most 2", value=3)
