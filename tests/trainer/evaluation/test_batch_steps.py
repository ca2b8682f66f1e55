"""`validation_step(dataloader_iter)` and the like: several loaders, streams, predictions, and what is refused.

Where they are Lightning's, `tests/parity/test_dataloader_iter.py` says so.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from equipoise import OOMRecovery, StepError
from tests.conftest import ignoring
from tests.support.trainer_runs import Small, Stream, loader, refuses, refuses_fit, trainer

pytestmark = ignoring()


class Evaluates(Small):
    """Pulls so many batches in each step of an evaluation, fewer where there are no more.

    Attributes:
        pulled: Indices of batches and loaders, by step.
        hooks: What the hooks around each step receive beside the batch.
    """

    def __init__(self, batches: int = 1) -> None:
        super().__init__()
        self.batches = batches
        self.pulled: list[list[tuple[int, int]]] = []
        self.hooks: list[Any] = []

    def pull(self, dataloader_iter: Iterator[Any]) -> list[Any]:
        taken = [one for _ in range(self.batches) if (one := next(dataloader_iter, None)) is not None]
        self.pulled.append([indices for _, *indices in taken])
        return [batch for batch, _, _ in taken]

    def test_step(self, dataloader_iter: Iterator[Any]) -> Any:
        batches = self.pull(dataloader_iter)
        self.log("samples", float(sum(len(batch[0]) for batch in batches)), reduce_fx="sum", batch_size=1)

    validation_step = test_step

    def predict_step(self, dataloader_iter: Iterator[Any]) -> Any:
        return torch.cat([self.layer(batch[0]) for batch in self.pull(dataloader_iter)])

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.hooks.append((batch is None, batch_idx, dataloader_idx))

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.hooks.append((batch_idx, dataloader_idx))


def test_a_step_stays_within_its_loader() -> None:
    module = Evaluates(2)
    results = trainer().test(module, [loader(3), loader(1, 5)], verbose=False)
    assert module.pulled == [[[0, 0], [1, 0]], [[2, 0]], [[0, 1]]]
    assert module.hooks == [(True, 0, 0), (1, 0), (False, 1, 0), (2, 0), (True, 0, 1), (0, 1)]
    assert results == [{"samples/dataloader_idx_0": 6.0}, {"samples/dataloader_idx_1": 5.0}]


@pytest.mark.parametrize(("batches", "steps"), [(1, [1, 1, 1]), (2, [2, 1]), (5, [3])])
def test_a_loader_without_length(batches: int, steps: list[int]) -> None:
    module = Evaluates(batches)
    trainer().test(module, DataLoader(Stream(6), batch_size=2), verbose=False)
    assert [len(pulled) for pulled in module.pulled] == steps


def test_an_empty_loader_has_no_step() -> None:
    module = Evaluates()
    with pytest.warns(UserWarning, match="gave no batch in this pass"):
        trainer().test(module, DataLoader(Stream(0), batch_size=2), verbose=False)
    assert module.pulled == []


class Overdraws(Evaluates):
    def test_step(self, dataloader_iter: Iterator[Any]) -> Any:
        for _ in range(self.batches):
            batch, *indices = next(dataloader_iter)
            self.pulled.append(indices)
            self.log("samples", float(len(batch[0])), reduce_fx="sum", batch_size=1)


def test_a_step_that_asks_for_too_many_ends_its_loader() -> None:
    module, run = Overdraws(2), trainer()
    with pytest.warns(UserWarning, match="`test_step` asked for more .* 1 of 3 batches were pulled"):
        run.test(module, [loader(3), loader(2)], verbose=False)
    assert module.pulled == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]]
    progress = run.test_loop.batch_progress
    assert (progress.current.ready, progress.current.completed, progress.is_last_batch) == (2, 2, True)
    run.test(Overdraws(1), loader(3), verbose=False)


def test_another_stop_iteration() -> None:
    class Stops(Evaluates):
        def test_step(self, dataloader_iter: Iterator[Any]) -> Any:
            next(dataloader_iter)
            next(iter(()))

    with pytest.raises(StepError, match="`test_step` raised StopIteration, though"):
        trainer().test(Stops(), loader(), verbose=False)


def test_a_mean_needs_the_number_of_samples() -> None:
    class Logs(Evaluates):
        def validation_step(self, dataloader_iter: Iterator[Any]) -> Any:
            self.log("value", float(len(next(dataloader_iter)[0][0])))

    with pytest.raises(MisconfigurationException, match="batch_size=n"):
        trainer().validate(Logs(), loader(), verbose=False)


def test_predictions() -> None:
    module = Evaluates(2)
    outputs = trainer().predict(module, loader(3))
    (features,) = loader(1, 6).dataset.tensors
    assert torch.equal(torch.cat(outputs), module.layer(features))
    assert [len(output) for output in outputs] == [4, 2]


def test_prediction_writers_refuse_such_a_step_themselves() -> None:
    with pytest.raises(NotImplementedError, match="does not support using `dataloader_iter`"):
        trainer(callbacks=[BasePredictionWriter("batch")]).predict(Evaluates(), loader())


# What is refused

ENTRIES = {"validation_step": "validate", "test_step": "test", "predict_step": "predict"}


@pytest.mark.parametrize("step", ENTRIES)
def test_one_device_is_needed_where_the_step_is_used(step: str) -> None:
    names = [f"`Evaluates.{step}(dataloader_iter)`", "strategy='dp'", "Take strategy='single_device'"]
    refuses(lambda: getattr(trainer(strategy="dp", devices=2), ENTRIES[step])(Evaluates(), loader()), *names)
    armed = trainer(callbacks=[OOMRecovery()])
    refuses(lambda: getattr(armed, ENTRIES[step])(Evaluates(), loader()), "cannot be done again", f"{step}(self, batch")


def test_a_fit_checks_the_validation_only_if_it_validates() -> None:
    trainer(strategy="dp", devices=2, limit_val_batches=0).fit(Evaluates(), loader(), loader())
    name = "`Evaluates.validation_step(dataloader_iter)`"
    refuses_fit(Evaluates(), name, data=(loader(), loader()), strategy="dp", devices=2)


def test_another_argument() -> None:
    class Module(Small):
        def test_step(self, dataloader_iter: Any, batch_idx: int) -> Any: ...

    refuses(lambda: trainer().test(Module(), loader()), "Module.test_step(dataloader_iter)", "takes the iterator alone")
