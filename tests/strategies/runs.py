"""Fits of a numbered network in several processes, and what they must have in common with one device."""

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from equipoise import Trainer
from tests.support.equality import assert_equal
from tests.support.networks.numbered import Numbered, Samples, numbered
from tests.support.pipelines import quiet

__all__ = ["assert_trains_alike", "fit", "numbers_in", "trainer"]


def trainer(strategy: Any = "ddp", devices: int = 2, **options: Any) -> Trainer:
    """A quiet trainer of two epochs in float64."""
    return quiet(strategy=strategy, devices=["cpu"] * devices, **{"max_epochs": 2, **options})


def fit(module: Any, strategy: Any = "ddp", devices: int = 2, count: int = 16, **options: Any) -> Trainer:
    """Train on samples, four in a step whatever the number of devices."""
    run = trainer(strategy, devices, **options)
    run.fit(module, DataLoader(Samples(count), batch_size=4 // devices))
    return run


def assert_trains_alike(
    kind: type[Numbered], *arguments: Any, strategy: Any = "ddp", count: int = 15, **options: Any
) -> Any:
    """Train in two processes and on one device, compare, and return the module of the two.

    Args:
        kind: The class of the module.
        arguments: Its arguments.
        strategy: The strategy of the two processes.
        count: The number of samples. Default: 15, so that an epoch ends with an uneven step.
        options: Arguments of both trainers.
    """
    one, many = numbered(kind, *arguments), numbered(kind, *arguments)
    fit(one, "single_device", 1, count, **options)
    fit(many, strategy, 2, count, **options)
    assert_equal(one, many, 1e-12, title="Weights")
    assert many.same
    return many


def numbers_in(epoch: Iterable[Iterable[list[int]]]) -> list[int]:
    """All numbers of samples that the processes saw in an epoch, sorted."""
    return sorted(number for process in epoch for batch in process for number in batch)
