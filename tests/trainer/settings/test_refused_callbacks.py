"""Finders that may search within a run are refused wherever they come from."""

from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner

from tests.support.trainer_runs import Small, loader, refuses, refuses_fit, trainer


class Milestones(LearningRateFinder):
    """Searches again within a fit."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.lr_find(trainer, pl_module)


class OfTests(BatchSizeFinder):
    """Searches before a test."""


@pytest.mark.parametrize("finder", [Milestones, OfTests])
def test_a_derived_finder_is_refused(finder: type[Callback]) -> None:
    base = finder.__mro__[1].__name__
    refuses(lambda: trainer(callbacks=[finder()]), finder.__name__, "is derived from", f"pass a {base} itself")


@pytest.mark.parametrize("entry", ["fit", "predict"])
def test_a_derived_finder_that_was_added_later_is_refused(entry: str) -> None:
    run = trainer()
    run.callbacks.append(OfTests())
    refuses(lambda: getattr(run, entry)(Small(), loader()), "OfTests", "is derived from")


def test_a_trainer_that_refused_a_finder_can_fit() -> None:
    run = trainer()
    run.callbacks.append(Milestones())
    refuses(lambda: run.fit(Small(), loader()), "Milestones")
    run.fit(module := Small(), loader())
    assert module.ran == ["training"] * 3


@pytest.mark.parametrize("finder", [BatchSizeFinder, LearningRateFinder])
def test_a_finder_of_configure_callbacks_is_refused(finder: type[Callback]) -> None:
    module = type("Module", (Small,), {"configure_callbacks": lambda self: finder()})()
    refuses_fit(module, "configure_callbacks", finder.__name__, "Trainer(callbacks=...)")


@pytest.mark.parametrize("method", ["validate", "predict"])
def test_a_search_for_an_evaluation_is_refused(method: str) -> None:
    module = Small()
    module.batch_size = 2
    refuses(
        lambda: Tuner(trainer()).scale_batch_size(module, dataloaders=loader(), method=method),
        "BatchSizeFinder cannot search",
        f"`{method}`",
    )
    assert module.ran == []
