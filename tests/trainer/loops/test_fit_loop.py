"""The training loop by itself: the order of hooks in an epoch, limits, ends, and the notes that outlive a run."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from equipoise import ConfigurationError
from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop
from equipoise.trainer.loops.fit_loop import FitLoop
from tests.support.contexts import training_context
from tests.support.trainer_runs import Stream, loader

TRAINING_HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
)
VALIDATION_HOOKS = ("on_validation_start", "on_validation_end")


class Recorded(L.LightningModule):
    """One linear layer; records its hooks and steps.

    Attributes:
        calls: The names of what ran, in order, with the index of the batch where there is one.
        skips_at: The batch before which the rest of an epoch is skipped.
    """

    def __init__(self, skips_at: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.calls: list[Any] = []
        self.skips_at = skips_at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls.append(("training_step", batch_idx))
        return self.layer(batch[0]).square().mean()

    def on_train_start(self) -> None:
        self.calls.append("on_train_start")

    def on_train_epoch_start(self) -> None:
        self.calls.append("on_train_epoch_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.calls.append(("on_train_batch_start", batch_idx))
        return -1 if batch_idx == self.skips_at else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(("on_train_batch_end", batch_idx))

    def on_train_epoch_end(self) -> None:
        self.calls.append("on_train_epoch_end")

    def on_train_end(self) -> None:
        self.calls.append("on_train_end")

    def configure_optimizers(self) -> Any:
        raise AssertionError("the test passes the optimiser")


class Validates(Recorded):
    """It validates as well."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.calls.append(("validation_step", batch_idx))

    def on_validation_model_eval(self) -> None:
        self.eval()

    def on_validation_start(self) -> None:
        self.calls.append("on_validation_start")

    def on_validation_end(self) -> None:
        self.calls.append("on_validation_end")


def fit_loop(module: Recorded, train: Any, val: Any = None, **settings: Any) -> FitLoop:
    """A loop that is ready to run.

    Args:
        module: The module.
        train, val: The loaders.
        settings: Arguments of the Trainer.
    """
    options = {"max_epochs": 1, "enable_model_summary": False, **settings}
    context = training_context(module, SGD(module.parameters(), lr=0.1), {"train": train, "val": val}, **options)
    loop = FitLoop(context.state, EvaluationLoop(context.state, "val", fitting=True))
    context.logs.enter(loop.fit.collection)
    context.state.training = True
    loop.begin_run(context)
    return loop


def batch_calls(*indices: int) -> list[Any]:
    """The calls of a batch each."""
    names = ("on_train_batch_start", "training_step", "on_train_batch_end")
    return [(name, index) for index in indices for name in names]


def test_the_order_of_an_epoch() -> None:
    module = Recorded()
    loop = fit_loop(module, loader(2))
    loop.run(loop.context)
    assert module.calls == [
        "on_train_start",
        "on_train_epoch_start",
        *batch_calls(0, 1),
        "on_train_epoch_end",
        "on_train_end",
    ]
    epoch = loop.fit.progress.epoch.current
    assert (epoch.ready, epoch.started, epoch.processed, epoch.completed) == (1, 1, 1, 1)
    assert loop.fit.progress.batch.current.completed == 2
    assert loop.fit.has_ended
    assert loop.fit.left is None


def test_validation_stands_after_the_last_hook_of_a_batch() -> None:
    module = Validates()
    loop = fit_loop(module, loader(2), loader(1), val_check_interval=1)
    loop.run(loop.context)
    validation = ["on_validation_start", ("validation_step", 0), "on_validation_end"]
    assert module.calls == [
        "on_train_start",
        "on_train_epoch_start",
        *batch_calls(0),
        *validation,
        *batch_calls(1),
        *validation,
        "on_train_epoch_end",
        "on_train_end",
    ]
    assert loop.state.training


def test_epochs_without_validation() -> None:
    module = Validates()
    loop = fit_loop(module, loader(1), loader(1), max_epochs=3, check_val_every_n_epoch=2)
    loop.run(loop.context)
    first_end = module.calls.index("on_train_epoch_end")
    assert "on_validation_start" not in module.calls[:first_end]
    assert module.calls.count("on_validation_start") == 1


@pytest.mark.parametrize(("skips_at", "steps"), [(0, []), (1, [0]), (2, [0, 1])])
def test_minus_one_skips_the_rest_of_the_epoch(skips_at: int, steps: list[int]) -> None:
    module = Recorded(skips_at)
    loop = fit_loop(module, loader(4), max_epochs=2)
    loop.run(loop.context)
    assert [index for name, index in _pairs(module.calls) if name == "training_step"] == steps * 2
    assert module.calls.count("on_train_epoch_end") == 2
    batch = loop.fit.progress.batch.current
    assert (batch.ready, batch.processed, batch.completed) == (skips_at + 1, skips_at + 1, skips_at)
    # The epoch is at its end: no later run continues it.
    assert loop.fit.batches_done()
    assert loop.fit.left is None


def _pairs(calls: list[Any]) -> list[tuple[str, int]]:
    return [call for call in calls if isinstance(call, tuple)]


def test_a_limit_of_steps_leaves_the_epoch_for_a_later_run() -> None:
    module = Recorded()
    loop = fit_loop(module, loader(4), max_epochs=-1, max_steps=3)
    loop.run(loop.context)
    assert [index for name, index in _pairs(module.calls) if name == "training_step"] == [0, 1, 2]
    assert not loop.fit.batches_done()
    assert loop.fit.left is not None
    assert loop.fit.left["positions"][0]["batch_is_done"]
    assert loop.fit.left["loop"]["epoch_loop.batch_progress"]["current"]["completed"] == 3


def test_limit_train_batches() -> None:
    module = Recorded()
    loop = fit_loop(module, loader(4), limit_train_batches=2, max_epochs=2)
    loop.run(loop.context)
    assert [index for name, index in _pairs(module.calls) if name == "training_step"] == [0, 1, 0, 1]
    assert loop.fit.data.max_batches == 2


@pytest.mark.parametrize("settings", [{"max_epochs": 0}, {"max_steps": 0}, {"limit_train_batches": 0}])
def test_no_hook_is_called_where_nothing_is_trained(settings: dict[str, Any]) -> None:
    module = Recorded()
    loop = fit_loop(module, loader(2), **settings)
    loop.run(loop.context)
    assert module.calls == []
    assert not loop.fit.has_ended


def test_a_hook_of_the_start_stops_training() -> None:
    class Stops(Recorded):
        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()
            self.trainer.should_stop = True

    module = Stops()
    loop = fit_loop(module, loader(2), max_epochs=3)
    loop.run(loop.context)
    assert module.calls == ["on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end"]


def test_a_second_run_continues_the_counters() -> None:
    module = Recorded()
    loop = fit_loop(module, loader(2), max_epochs=1)
    loop.run(loop.context)
    loop.state.max_epochs = 2
    loop.begin_run(loop.context)
    assert loop.fit.data.loaders is None
    loop.run(loop.context)
    assert module.calls.count("on_train_epoch_start") == 2
    assert loop.fit.progress.batch.total.completed == 4


def test_an_empty_epoch_is_not_repeated_for_ever() -> None:
    loop = fit_loop(Recorded(), DataLoader(Stream(0), batch_size=2), max_epochs=-1)
    with pytest.warns(UserWarning, match="no batch"), pytest.raises(ConfigurationError, match="empty epochs forever"):
        loop.run(loop.context)


def test_the_weights_are_those_of_plain_steps() -> None:
    module = Recorded().double()
    expected = nn.Linear(2, 1).double()
    expected.load_state_dict(module.layer.state_dict())
    optimizer = SGD(expected.parameters(), lr=0.1)
    batches = [(torch.randn(3, 2, dtype=torch.float64),) for _ in range(3)]
    loop = fit_loop(module, DataLoader(batches, batch_size=None), max_epochs=2)
    loop.run(loop.context)
    for (features,) in batches * 2:
        optimizer.zero_grad()
        expected(features).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(module.layer.weight, expected.weight, rtol=1e-12, atol=1e-12)


def test_release_ends_the_stream_and_forgets_the_watch() -> None:
    loop = fit_loop(Recorded(), loader(2))
    loop.run(loop.context)
    assert loop.loss_watch is not None
    loop.release()
    assert loop.loss_watch is None
    assert loop.fit.data.stream is None


def test_a_copy_for_another_process_has_no_run() -> None:
    loop = fit_loop(Recorded(), loader(2))
    loop.run(loop.context)
    state = loop.__getstate__()
    of_run = {"resumption", "loss_watch", "step_class", "uncounted_steps", "_close_epoch_hooks"}
    assert set(state) == {"state", "val_loop", "fit", "later_files", "last_writes"} | of_run
    assert state["_close_epoch_hooks"] is None
    assert state["loss_watch"] is None
