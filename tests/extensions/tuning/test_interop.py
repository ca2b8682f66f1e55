"""Private names of Lightning's finders: what a search reads under them, and the refusal without them."""

from typing import Any

import lightning as L
import lightning_utilities.core.rank_zero as rank_zero_module
import pytest
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from equipoise import ConfigurationError
from equipoise.extensions.tuning import interop
from equipoise.extensions.tuning.interop import (
    learning_rate_settings,
    results_of,
)
from tests.support.hidden_names import hide
from tests.support.trainer_runs import Small, loader, trainer


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_the_results_of_a_search_are_of_the_package_of_its_finder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The import of the older package puts a logger of its own there, which other tests would miss.
    monkeypatch.setattr(rank_zero_module, "log", rank_zero_module.log)
    package = pytest.importorskip(name, exc_type=ImportError)
    finder = package.callbacks.LearningRateFinder()
    results = results_of(finder, learning_rate_settings(finder), [0.1], [1.0])
    assert type(results).__module__ == f"{name}.tuner.lr_finder"


# What is refused


@pytest.mark.parametrize(
    ("finder", "name", "remedy"),
    [
        (LearningRateFinder(), "_min_lr", "Set the learning rate by hand"),
        (BatchSizeFinder(), "_max_val", "equipoise plan"),
    ],
)
def test_finders_without_a_private_name_are_refused(
    finder: Any, name: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, type(finder), name)
    kind = type(finder).__name__
    with pytest.raises(ConfigurationError) as error:
        trainer(callbacks=[finder]).fit(Small(), loader())
    assert f"{kind} does not work with lightning {L.__version__}, which lacks {kind}.{name}. It was" in str(error.value)
    assert remedy in str(error.value)


def test_a_search_without_the_class_of_its_results_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interop, "_RESULTS", "lightning.pytorch.tuner.lr_finder._Gone")
    with pytest.raises(ConfigurationError, match=r"which lacks lightning.*_Gone.*pip install 'lightning>="):
        trainer(callbacks=[LearningRateFinder()]).fit(Small(), loader())
