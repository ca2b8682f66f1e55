"""The position of a run and the counters with which a resumed run continues, hook by hook."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from torch.optim import SGD

from equipoise.trainer.data.batch_stream import NOTHING
from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.loops.position import position_of
from equipoise.trainer.loops.resumption import Resumption
from equipoise.trainer.state.progress import Counts
from tests.support.contexts import training_context
from tests.support.trainer_runs import Small


class Parts:
    """Context, state and validation loop of a fit that has not begun."""

    def __init__(self, module: L.LightningModule | None = None, **settings: Any) -> None:
        self.module = module or Small()
        options = {"max_epochs": 3, "enable_model_summary": False, **settings}
        self.context = training_context(self.module, SGD(self.module.parameters(), lr=0.1), **options)
        self.fit = FitState(self.context.state.progress)
        self.val_loop = EvaluationLoop(self.context.state, "val", fitting=True)
        self.context.logs.enter(self.fit.collection)

    def position(self) -> dict[str, Any]:
        return position_of(self.context, self.fit, self.val_loop)

    def resumption(self, position: dict[str, Any] | None, written_in: list[str] | None = None) -> Resumption:
        loop_state = self.fit.state_dict()
        return Resumption(self.context, self.fit, self.val_loop, position, loop_state, written_in)


# Position


@pytest.mark.parametrize(("ahead", "stored"), [(NOTHING, []), (None, [None]), ((1, "a"), [(1, "a")]), (object(), [])])
def test_the_batch_that_was_read_ahead(ahead: Any, stored: list[Any]) -> None:
    parts = Parts()
    parts.fit.data.stream = SimpleNamespace(ahead=ahead)  # type: ignore[assignment]
    position = parts.position()
    assert position["ahead"] == stored
    assert position["order_drawn"]


# Counters: ready, started, processed, completed


@dataclass
class Case:
    """Counters of a checkpoint, and what a resumed run concludes from them."""

    epoch: tuple[int, int, int, int]
    batch: tuple[int, int, int, int]
    flags: set[str]
    position: dict[str, Any] | None = None
    # Batches that are complete when training continues. Default: unchanged.
    ready: int | None = None


CASES = {
    "before the first batch": Case((1, 1, 0, 0), (0, 0, 0, 0), {"in_epoch"}),
    "on_train_epoch_start": Case((2, 1, 1, 1), (4, 4, 4, 4), {"in_validation"}),
    "on_train_batch_start": Case((1, 1, 0, 0), (3, 2, 2, 2), {"in_epoch", "batch_again"}, ready=2),
    "training_step": Case((1, 1, 0, 0), (3, 3, 2, 2), {"in_epoch", "batch_again"}, ready=2),
    "on_train_batch_end": Case((1, 1, 0, 0), (3, 3, 3, 2), {"in_epoch", "batch_unfinished"}),
    "a hook of validation": Case((1, 1, 0, 0), (3, 3, 3, 3), {"in_epoch", "in_validation"}),
    "an epoch that was left": Case((1, 1, 0, 0), (3, 3, 3, 3), {"in_epoch"}, {"batch_is_done": True}),
    "on_train_epoch_end": Case((1, 1, 1, 0), (4, 4, 4, 4), {"at_epoch_end", "in_validation"}),
    "after the fit": Case((1, 1, 1, 1), (4, 4, 4, 4), {"in_validation"}),
}
FLAGS = ("in_epoch", "at_epoch_end", "batch_again", "batch_unfinished", "in_validation")


@pytest.mark.parametrize("name", CASES)
def test_where_a_checkpoint_was_written(name: str) -> None:
    case = CASES[name]
    parts = Parts()
    position = None
    if case.position is not None:
        position = {**parts.position(), **case.position}
    progress = parts.fit.progress
    progress.epoch.current = Counts(*case.epoch)
    progress.batch.current = Counts(*case.batch)
    resumption = parts.resumption(position)
    assert {flag for flag in FLAGS if getattr(resumption, flag)} == case.flags
    expected = case.batch[0] if case.ready is None else case.ready
    assert progress.batch.current.ready == expected
    # The loop has read as many batches as it began.
    assert progress.pulled.current.ready == expected
