"""Strategies from the command line, on the digits example."""

import csv

import pytest


@pytest.mark.quick_cases(1)
@pytest.mark.thorough
@pytest.mark.parametrize(
    "choice",
    [
        ["strategy=balanced", "trainer.devices=[cpu,cpu,cpu]", "strategy.shares=[1,3,3]"],
        [
            "strategy=balanced",
            "trainer.devices=2",
            "strategy.first_device_batch_size=4",
            "strategy.parallelize=forward",
        ],
    ],
    ids=" ".join,
)
def test_digits(empty_folder, equipoise, choice):
    code, _, err = equipoise("fit", *choice, "trainer.max_epochs=3", "trainer.enable_progress_bar=false")
    assert code == 0, err
    (metrics,) = empty_folder.glob("outputs/*/*/metrics.csv")
    with metrics.open() as file:
        accuracy = [float(row["test_accuracy"]) for row in csv.DictReader(file) if row["test_accuracy"]]
    assert accuracy[-1] > 0.9


@pytest.mark.thorough
def test_shares_of_the_wrong_length(empty_folder, equipoise):
    code, _, err = equipoise("fit", "strategy=balanced", "trainer.devices=2", "strategy.shares=[1,3,3]")
    assert code == 2
    assert err.splitlines()[-1].startswith("equipoise: shares=[1, 3, 3] are 3 numbers, but there are 2 devices")
