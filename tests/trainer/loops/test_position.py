"""The position of a run and the counters with which a resumed run continues, hook by hook."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.optim import SGD

from equipoise import ConfigurationError
from equipoise.trainer.data.batch_stream import NOTHING
from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop
from equipoise.trainer.loops.fit_state import FitState
from equipoise.trainer.loops.position import position_of
from equipoise.trainer.loops.resumption import Resumption, resume
from equipoise.trainer.state.progress import Counts
from tests.support.contexts import training_context
from tests.support.trainer_runs import Small, loader


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


def test_a_position_between_two_windows_has_no_gradients() -> None:
    parts = Parts()
    parts.module.layer.weight.grad = torch.ones(1, 2)
    assert parts.position()["gradients"] == []


def test_a_position_within_a_window_has_the_gradients_of_all_parameters() -> None:
    parts = Parts()
    parts.fit.window.add(4)
    parts.module.layer.weight.grad = torch.ones(1, 2)
    weight, bias = parts.position()["gradients"]
    assert torch.equal(weight, torch.ones(1, 2))
    assert bias is None


@pytest.mark.parametrize(("ahead", "stored"), [(NOTHING, []), (None, [None]), ((1, "a"), [(1, "a")]), (object(), [])])
def test_the_batch_that_was_read_ahead(ahead: Any, stored: list[Any]) -> None:
    parts = Parts()
    parts.fit.data.stream = SimpleNamespace(ahead=ahead)  # type: ignore[assignment]
    position = parts.position()
    assert position["ahead"] == stored
    assert position["order_drawn"]


def test_early_stopping_is_named_if_it_has_stopped_the_run() -> None:
    callback = L.pytorch.callbacks.EarlyStopping("loss")
    parts = Parts(callbacks=[callback])
    assert parts.position()["stopped_by"] == []
    callback.stopping_reason = L.pytorch.callbacks.early_stopping.EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert parts.position()["stopped_by"] == []
    parts.context.state.should_stop = True
    assert parts.position()["stopped_by"] == [callback.state_key]


def test_gradients_come_back_and_others_stay() -> None:
    parts = Parts()
    parts.fit.window.add(4)
    parts.module.layer.weight.grad = torch.ones(1, 2)
    position = parts.position()
    parts.module.zero_grad()
    resumption = parts.resumption(position)
    assert parts.fit.window.is_open
    resumption.load_gradients()
    assert torch.equal(parts.module.layer.weight.grad, torch.ones(1, 2))
    assert parts.module.layer.bias.grad is None


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


def test_an_epoch_that_had_only_begun_is_begun_again() -> None:
    parts = Parts()
    parts.fit.progress.epoch.current = Counts(2, 1, 1, 1)
    parts.resumption(None)
    assert parts.fit.progress.epoch.current == Counts(1, 1, 1, 1)


@pytest.mark.parametrize(("completed", "is_last", "ended"), [(2, True, True), (1, True, False), (2, False, False)])
def test_a_validation_at_its_end_is_not_done_again(completed: int, is_last: bool, ended: bool) -> None:
    parts = Parts()
    before = {"random_state": {}, "metrics": {}, "val_loaders": {"loaded_at": 0}}
    position = {**parts.position(), "before_validation": before, "val_loaders": {"loaded_at": 1}}
    progress = parts.fit.progress
    progress.epoch.current = Counts(1, 1, 0, 0)
    progress.batch.current = Counts(3, 3, 3, 3)
    progress.val_batch.current = Counts(2, 2, 2, completed)
    progress.val_batch.mark_last(is_last)
    resumption = parts.resumption(position)
    assert resumption.has_validated() is ended
    # One that is done again reads the loaders as it did at its beginning.
    assert parts.val_loop.resumed == {"loaded_at": 1 if ended else 0}


# resume


def test_a_run_that_early_stopping_ended_ends_again() -> None:
    callback = L.pytorch.callbacks.EarlyStopping("loss")
    for stopped_by, stops in (([callback.state_key], True), (["another"], False), ([], False)):
        parts = Parts(callbacks=[callback])
        position = {**parts.position(), "stopped_by": stopped_by}
        resume(parts.context, parts.fit, parts.val_loop, parts.fit.state_dict(), {"position": position})
        assert parts.context.state.should_stop is stops


@pytest.mark.parametrize(("max_steps", "continues"), [(3, False), (4, True), (-1, True)])
def test_an_epoch_that_was_left_continues_if_the_limits_allow_it(max_steps: int, continues: bool) -> None:
    parts = Parts(max_steps=max_steps)
    parts.fit.progress.epoch.current = Counts(1, 1, 0, 0)
    parts.fit.progress.batch.current = Counts(3, 3, 3, 3)
    parts.fit.progress.optimizer_step.current.set(3)
    left = {"loop": parts.fit.state_dict(), "positions": [{**parts.position(), "batch_is_done": True}]}
    parts.fit.progress.epoch.current = Counts(1, 1, 1, 1)
    resumption = resume(
        parts.context,
        parts.fit,
        parts.val_loop,
        parts.fit.state_dict(),
        {"position": parts.position(), "left": left, "written_in": ["on_train_epoch_end", "key"]},
    )
    assert resumption.in_epoch is continues
    assert resumption.written_in == (None if continues else ["on_train_epoch_end", "key"])
    assert parts.fit.left is left


def test_another_number_of_processes_needs_the_same_steps() -> None:
    parts = Parts()
    parts.fit.data.set_max_batches(4)
    positions = [parts.position(), parts.position()]
    ours = {"position": positions[0], "positions": positions}
    parts.fit.progress.epoch.current = Counts(1, 1, 0, 0)
    parts.fit.progress.batch.current = Counts(3, 3, 3, 3)
    resumption = resume(parts.context, parts.fit, parts.val_loop, parts.fit.state_dict(), ours)
    resumption.check_steps()
    parts.fit.data.steps.obstacle = "nobody knows them"
    with pytest.raises(ConfigurationError, match=r"by another number of processes, .*: nobody knows them\. Resume"):
        resumption.check_steps()
    # At the last batch nothing is left to share out.
    parts.fit.progress.batch.current = Counts(4, 4, 4, 4)
    resume(parts.context, parts.fit, parts.val_loop, parts.fit.state_dict(), ours).check_steps()


def test_steps_that_pulled_several_batches_cannot_continue_with_one_each() -> None:
    parts = Parts()
    parts.fit.progress.epoch.current = Counts(1, 1, 0, 0)
    parts.fit.progress.batch.current = Counts(2, 2, 2, 2)
    pulled = {"total": Counts(6, 6, 6, 6).state_dict(), "current": Counts(6, 6, 6, 6).state_dict()}
    resumption = parts.resumption({**parts.position(), "pulled": pulled})
    with pytest.raises(ConfigurationError, match=r"after 2 steps of a .* that had pulled 6 batches"):
        resumption.start_stream()


def test_a_stream_continues_behind_the_batches_that_were_read() -> None:
    torch.manual_seed(3)
    train = loader(5, shuffle=True)
    parts = Parts()
    parts.context.sources["train"].loaders = train
    data = parts.fit.data
    data.request(parts.context)
    data.make_stream(None)
    data.draw_order()
    assert data.stream is not None
    batches = [features for (features,) in data.stream]
    parts.fit.progress.epoch.current = Counts(1, 1, 0, 0)
    parts.fit.progress.batch.current = Counts(3, 3, 3, 3)
    position = parts.position()
    # Another process: the generators are elsewhere.
    torch.manual_seed(99)
    data.make_stream(None)
    parts.resumption(position).start_stream()
    rest = [features for (features,) in data.stream]
    assert len(rest) == 2
    assert all(torch.equal(first, second) for first, second in zip(rest, batches[3:], strict=True))
