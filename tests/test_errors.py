"""Errors of Equipoise are also what programs for Lightning catch, and Lightning is not imported for that."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from equipoise import CheckpointError, ConfigurationError, StepError, WorkerError
from equipoise.errors import ConfigurationRuntimeError, ConfigurationTypeError

KINDS = [ConfigurationError, ConfigurationTypeError, ConfigurationRuntimeError, StepError]


@pytest.mark.parametrize("kind", KINDS)
def test_lightnings_class_catches_it(kind: type[Exception]) -> None:
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
    ],
)
def test_the_standard_class_catches_it(kind: type[Exception], standard: type[Exception]) -> None:
    with pytest.raises(standard):
        raise kind("the rule")


@pytest.mark.parametrize("kind", [CheckpointError, WorkerError])
def test_other_errors_are_no_wrong_input(kind: type[Exception]) -> None:
    assert not isinstance(kind("lost"), MisconfigurationException)


@pytest.mark.parametrize("kind", KINDS)
def test_it_travels_between_processes(kind: type[Exception]) -> None:
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


def test_a_subclass_with_arguments_of_its_own() -> None:
    with pytest.raises(MisconfigurationException, match="at most 2: 3"):
        raise TwoArguments("at most 2", value=3)


WITHOUT_LIGHTNING = """
import pickle, sys
from equipoise import ConfigurationError
error = ConfigurationError("the rule")
assert type(error) is ConfigurationError
assert not any(name.startswith("lightning") for name in sys.modules)
sent = pickle.dumps(error)
from lightning.fabric.utilities.exceptions import MisconfigurationException
assert isinstance(pickle.loads(sent), MisconfigurationException)
"""


@pytest.mark.slow
def test_lightning_is_not_imported_for_it(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_LIGHTNING]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
