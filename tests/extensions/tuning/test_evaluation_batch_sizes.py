"""The search for a batch size before a validation, a test or a prediction."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from equipoise import Trainer
from tests.support.trainer_runs import Stream, Validated, loader, refuses, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The Batch size finder", "ignore:No .* loader")
METHODS = ["validate", "test", "predict"]
SAMPLES = 100


class Sized(Validated):
    """Runs out of memory with batches larger than `most`; its loaders have the size of its attribute.

    Attributes:
        seen: Sizes of the batches of evaluation steps.
    """

    seen: list[int]

    def __init__(self, most: int = 10**6) -> None:
        super().__init__()
        self.most = most
        self.batch_size = 4
        self.seen = []

    def loss(self, batch: Any) -> Any:
        self.seen.append(len(batch[0]))
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError(f"{len(batch[0])} samples")
        return super().loss(batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.loss(batch)

    def made_loader(self) -> Any:
        return DataLoader(loader(SAMPLES, 1).dataset, batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = made_loader


class Data(L.LightningDataModule):
    """Has the batch size among its hyperparameters, and counts its setups."""

    def __init__(self, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()

    def predict_dataloader(self) -> Any:
        return [DataLoader(Stream(7), batch_size=self.hparams["batch_size"]), loader(3)]


def search(method: Any, module: Any, cls: Any = Trainer, **settings: Any) -> Any:
    return Tuner(trainer(cls)).scale_batch_size(module, method=method, **settings)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *((method, {}) for method in METHODS),
        *((METHODS[0], settings) for settings in ({"init_val": 25}, {"max_trials": 3}, {"init_val": 200})),
        (METHODS[-1], {"max_val": 16}),
    ],
)
def test_sizes_are_those_of_lightning_where_all_fit(method: str, settings: dict[str, Any]) -> None:
    sizes = []
    for cls in (L.Trainer, Trainer):
        module = Sized()
        found = search(method, module, cls, **settings)
        assert found == module.batch_size
        sizes.append(found)
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("settings", "most", "expected"),
    [
        ({}, 40, 32),
        ({"mode": "binsearch"}, 40, 38),
        ({"mode": "binsearch", "max_val": 30}, 40, 30),
        ({"mode": "binsearch", "margin": 0.0, "max_trials": 8}, 41, 40),
        ({"init_val": 16, "mode": "binsearch", "margin": 0.0}, 3, 3),
        ({"init_val": 2, "mode": "binsearch", "margin": 0.9}, 3, 1),
    ],
)
def test_the_largest_size_that_fits(settings: dict[str, Any], most: int, expected: int) -> None:
    module = Sized(most)
    assert search(METHODS[-1], module, **settings) == module.batch_size == expected
    assert module.seen == []
    assert module.batch_size <= most


# The warning of torch about a line of Lightning does not reach the user.
@pytest.mark.filterwarnings("error:.*LeafSpec")
@pytest.mark.parametrize("method", METHODS)
def test_a_callback_searches_and_the_evaluation_follows(method: str) -> None:
    module, finder = Sized(40), BatchSizeFinder(steps_per_trial=2)
    run = trainer(callbacks=[finder])
    getattr(run, method)(module)
    assert finder.optimal_batch_size == module.batch_size == 32
    assert module.seen == [32, 32, 32, 4]


def test_nothing_else_notices_the_search() -> None:
    """Weights, random numbers and results are those of a test that had the size from the beginning."""
    results = []
    for callbacks in ([BatchSizeFinder()], []):
        torch.manual_seed(3)
        module = Sized(40)
        module.batch_size = 32
        results.append((trainer(callbacks=callbacks).test(module, verbose=False), torch.rand(1).item()))
    assert results[0] == results[1]


def test_a_data_module_with_a_stream_is_searched_until_the_trials_end() -> None:
    """Without a number of samples the trials end the search."""
    data = Data()
    found = Tuner(trainer()).scale_batch_size(Validated(), datamodule=data, method="predict", max_trials=3)
    assert found == data.hparams["batch_size"] == 8


def test_several_loaders_of_an_evaluation_have_one_size() -> None:
    class TwoLoaders(Sized):
        def predict_dataloader(self) -> list[Any]:
            return [self.made_loader(), self.made_loader()]

    module = TwoLoaders(40)
    assert search("predict", module, steps_per_trial=2) == module.batch_size == 32
    module.seen.clear()
    trainer().predict(module)
    assert module.seen == [32, 32, 32, 4] * 2


def test_loaders_that_were_passed_are_not_searched() -> None:
    tuner, module = Tuner(trainer()), Sized()
    refuses(
        lambda: tuner.scale_batch_size(module, dataloaders=loader(), method="test"),
        "passed to `test`",
        "Let the module",
    )
    trainer(callbacks=[BatchSizeFinder()]).test(module, loader(), verbose=False)
    assert module.seen == [2, 2, 2]


def test_searches_that_are_refused() -> None:
    refuses(lambda: search("test", Validated()), "`batch_size`", "batch_arg_name")
    refuses(lambda: search("test", Sized(), init_val=0), "init_val=0", "at least 1")
    refuses(lambda: search("test", Sized(0), init_val=4), "with each of 3 sizes, down to 1")
    with pytest.warns(UserWarning, match="fast_dev_run: BatchSizeFinder does not search"):
        trainer(fast_dev_run=True, callbacks=[BatchSizeFinder()]).test(Sized(), verbose=False)


def test_a_finder_of_a_learning_rate_waits_for_a_fit() -> None:
    module = Sized()
    trainer(callbacks=[LearningRateFinder()]).test(module, verbose=False)
    assert set(module.seen) == {4}
