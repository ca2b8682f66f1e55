"""The evaluation loop by itself: the order of its hooks, its counters, and when its loaders are requested."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop
from tests.support.contexts import training_context
from tests.support.trainer_runs import loader


class Recorded(L.LightningModule):
    """Records its hooks and steps, and whether it was in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.calls: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any: ...

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.calls.append(("step", batch_idx, dataloader_idx))
        return self.layer(batch[0]).sum()

    def on_validation_model_eval(self) -> None:
        self.calls.append("model_eval")
        self.eval()

    def on_validation_start(self) -> None:
        self.calls.append("start")

    def on_validation_epoch_start(self) -> None:
        self.calls.append("epoch_start")

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.calls.append(("batch_start", batch_idx, dataloader_idx))

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        assert outputs.shape == ()
        self.calls.append(("batch_end", batch_idx, dataloader_idx))

    def on_validation_epoch_end(self) -> None:
        self.calls.append("epoch_end")

    def on_validation_end(self) -> None:
        self.calls.append("end")


def evaluation(module: Recorded, val: Any, **settings: Any) -> tuple[EvaluationLoop, Any]:
    """A loop that is ready to run, and its context."""
    context = training_context(module, None, {"val": val}, enable_model_summary=False, **settings)
    loop = EvaluationLoop(context.state, "val", fitting=True)
    context.logs.enter(loop.collection)
    return loop, context


def batch_calls(*indices: tuple[int, int]) -> list[Any]:
    return [(name, *index) for index in indices for name in ("batch_start", "step", "batch_end")]


START = ["model_eval", "start", "epoch_start"]
END = ["epoch_end", "end"]


def test_the_order_of_an_evaluation() -> None:
    module = Recorded()
    loop, context = evaluation(module, loader(2))
    assert loop.run(context) == [{}]
    assert module.calls == [*START, *batch_calls((0, 0), (1, 0)), *END]
    assert module.training
    counts = loop.progress.current
    assert (counts.ready, counts.started, counts.processed, counts.completed) == (2, 2, 2, 2)
    assert loop.progress.is_last_batch
    assert loop.has_run


def test_loaders_are_read_one_after_another() -> None:
    module = Recorded()
    loop, context = evaluation(module, [loader(1), loader(2)])
    assert loop.run(context) == [{}, {}]
    assert module.calls == [*START, *batch_calls((0, 0), (0, 1), (1, 1)), *END]
    assert loop.progress.current.completed == 3


def test_a_sanity_check_reads_a_few_batches_and_leaves_no_trace() -> None:
    module = Recorded()
    loop, context = evaluation(module, loader(5), num_sanity_val_steps=2)
    context.state.sanity_checking = True
    loop.run(context)
    assert [call[1] for call in module.calls if call[0] == "step"] == [0, 1]
    assert not loop.has_run


@pytest.mark.parametrize(("limit", "batches"), [(0, []), (2, [0, 1]), (0.5, [0, 1]), (9, [0, 1, 2, 3])])
def test_limit_val_batches(limit: float, batches: list[int]) -> None:
    module = Recorded()
    loop, context = evaluation(module, loader(4), limit_val_batches=limit)
    loop.run(context)
    assert [call[1] for call in module.calls if call[0] == "step"] == batches
    assert (loop.loaders is None) is (limit == 0)


@pytest.mark.parametrize(("every", "requests"), [(0, [0, 0, 0, 0]), (1, [0, 1, 2, 3]), (2, [0, 0, 2, 2])])
def test_loaders_are_requested_again(every: int, requests: list[int]) -> None:
    loop, context = evaluation(Recorded(), loader(1), reload_dataloaders_every_n_epochs=every)
    requested_at = []
    for epoch in range(4):
        context.state.progress.epoch.current.set(epoch)
        loop.load_data(context)
        requested_at.append(loop.loaded_at)
    assert requested_at == requests


def test_a_resumed_run_continues_with_the_loaders_of_the_earlier_one() -> None:
    loop, context = evaluation(Recorded(), loader(1), reload_dataloaders_every_n_epochs=2)
    saved = {"loaded_at": 2, "workers": [], "steps_logged": [[0, 7]]}
    context.state.progress.epoch.current.set(3)
    loop.resume_loaders(saved)
    # Until the loaders are requested, the state of the earlier run stays valid.
    assert loop.loaders_state() is saved
    loop.load_data(context)
    assert loop.loaders_state() == saved


def test_a_resumed_run_requests_loaders_that_are_due() -> None:
    loop, context = evaluation(Recorded(), loader(1), reload_dataloaders_every_n_epochs=2)
    context.state.progress.epoch.current.set(4)
    loop.resume_loaders({"loaded_at": 2, "workers": [], "steps_logged": [[0, 7]]})
    loop.load_data(context)
    assert loop.loaders_state() == {"loaded_at": 4, "workers": [], "steps_logged": []}


def test_an_interrupt_restores_the_modes_and_an_error_does_not() -> None:
    class Raises(Recorded):
        error: type[BaseException] = RuntimeError

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            raise self.error

    for error, is_training in ((KeyboardInterrupt, True), (RuntimeError, False)):
        module = Raises()
        module.error = error
        loop, context = evaluation(module, loader(1))
        with pytest.raises(error):
            loop.run(context)
        assert module.training is is_training
