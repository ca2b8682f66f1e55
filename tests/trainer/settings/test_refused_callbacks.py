"""Lightning's tuner is refused in the same words wherever its callbacks come from."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.tuner import Tuner

from tests.conftest import ignoring
from tests.support.trainer_runs import Small, loader, refuses, trainer

pytestmark = ignoring()
BY_HAND = "raise the batch size by hand"


class Tuned(Small):
    """A module with the attributes that the tuner sets."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return loader(batch_size=self.batch_size)


def test_the_tuner_is_refused_before_anything_runs() -> None:
    run = trainer()
    module = Tuned()
    refuses(
        lambda: Tuner(run).scale_batch_size(module), "BatchSizeFinder", "`Tuner.scale_batch_size`", "Instead", BY_HAND
    )
    assert module.ran == []


@pytest.mark.parametrize("entry", ["fit", "validate", "test", "predict"])
def test_a_finder_that_was_added_later(entry: str) -> None:
    run = trainer()
    run.callbacks.append(BatchSizeFinder())
    refuses(lambda: getattr(run, entry)(Small(), loader()), "BatchSizeFinder", BY_HAND)


def test_the_trainer_can_go_on_to_be_used() -> None:
    run = trainer()
    refuses(lambda: Tuner(run).scale_batch_size(Tuned()), "BatchSizeFinder")
    run.fit(module := Tuned())
    assert module.ran == ["training"] * 3
