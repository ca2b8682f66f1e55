"""A run in several processes has the bits of one on one device: weights, logged values, states of optimisers."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from equipoise import Trainer, VirtualDevicesStrategy
from tests.extensions.virtual.modules import (
    SAMPLES,
    Augmented,
    FirstPartSkipped,
    LoggingHooks,
    Neighbours,
    Noisy,
    Plain,
    RandomHooks,
    Reading,
    Skipping,
    Sparse,
    Stateful,
    Texts,
    Weighed,
    noisy_collate,
)
from tests.extensions.virtual.runs import SaveAfter, expected_of, on_one_device, rows, run, small_trainer
from tests.support.equality import assert_equal
from tests.support.quiet import QUIET
from tests.support.trainer_runs import refuses, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The val loader shuffles", "ignore:Sparse CSR tensor support is in beta")

WINDOW = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
WORKERS = {"num_workers": 2, "persistent_workers": True}
RANDOM_DATA = {"data": Augmented(), "collate_fn": noisy_collate, **WORKERS}
WEIGHTS = torch.arange(1.0, SAMPLES + 1).tolist()


class ReadsWhatOneLogged(L.Callback):
    """Each process has the value that one process has logged."""

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        assert trainer.callback_metrics["first"] == 0.5 / (1 + trainer.current_epoch)


def random_evaluation(**options: Any) -> dict[str, Any]:
    return {
        "val": DataLoader(Augmented(), batch_size=10, **options),
        "num_sanity_val_steps": 1,
        "val_check_interval": 2,
    }


RUNS: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "losses with weights in a clipped window": (Weighed, 3, WINDOW),
    "parts without a loss": (Skipping, 2, {}),
    "six parts on unequal devices in bfloat16": (Noisy, 2, {"count": 6, "shares": [1, 3], "precision": "bf16-mixed"}),
    "a process without a part in the last step": (Plain, 2, {"batch_size": 28}),
    "a process without a part in the first step": (Plain, 2, {"limit_train_batches": 1, "batch_size": 3}),
    "the first part has no loss": (FirstPartSkipped, 2, {}),
    "buffers and attributes that the step changes": (Stateful, 3, {}),
    "sparse and strided gradients of a window": (Sparse, 3, {"accumulate_grad_batches": 3}),
    "sparse buffers by rows": (Neighbours, 2, {}),
    "logs of hooks": (
        LoggingHooks,
        2,
        {"callbacks": [L.pytorch.callbacks.EarlyStopping("first"), ReadsWhatOneLogged()], "num_sanity_val_steps": 0},
    ),
    "hooks and evaluations that draw": (RandomHooks, 3, random_evaluation()),
    "a shuffled evaluation": (RandomHooks, 2, random_evaluation(shuffle=True, num_workers=1)),
    "random data of workers": (Noisy, 3, RANDOM_DATA),
    "a weighted sampler": (
        Noisy,
        2,
        {**RANDOM_DATA, "sampler": WeightedRandomSampler(WEIGHTS, SAMPLES), "shuffle": None},
    ),
    "a subset of samples that are read together": (Reading, 2, {"data": Subset(Texts(), range(SAMPLES))}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_processes_have_the_bits_of_one_device(name: str) -> None:
    kind, devices, options = RUNS[name]
    assert_equal(expected_of(kind, options), run(kind, devices, **options))


@pytest.mark.thorough
def test_another_number_of_virtual_devices_is_another_run() -> None:
    assert not torch.equal(on_one_device(Noisy)["net.0.weight"], on_one_device(Noisy, count=4)["net.0.weight"])


def test_by_default_it_takes_no_more_devices_than_have_a_part() -> None:
    available = [torch.device("cuda", index) for index in range(3)]
    assert VirtualDevicesStrategy(count=2).default_devices(available) == available[:2]
    assert Trainer(strategy="virtual", accelerator="cpu", **QUIET).num_devices == 1


def test_random_numbers_of_the_data_depend_on_the_seed() -> None:
    """One epoch of the same samples in the same order differs by the seed of the run alone."""
    sums = []
    for seed in (1, 2):
        L.seed_everything(seed, verbose=False)
        module = Noisy()
        module.on_train_batch_start = lambda batch, batch_idx: sums.append(batch[0].sum())  # type: ignore[method-assign]
        data = TensorDataset(torch.zeros(8, 6), torch.zeros(8, 1))
        small_trainer(count=2).fit(module, DataLoader(data, batch_size=8, collate_fn=noisy_collate))
    assert sums[0] != sums[1]


@pytest.mark.slow
def test_predictions_draw_alike_and_each_time_anew() -> None:
    found = []
    for devices in (1, 2):
        L.seed_everything(1, verbose=False)
        trainer = small_trainer(devices=devices)
        loader = DataLoader(TensorDataset(torch.zeros(7, 6), torch.zeros(7, 1)), batch_size=2)
        module = RandomHooks()
        found.append([torch.cat(trainer.predict(module, loader) or []) for _ in range(2)])
    assert_equal(*found)
    assert not torch.equal(*found[0])


# Continued runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "window", "batches"),
    [(1, 2, 1, 3), (2, 3, 3, 5), (3, 1, 3, 7)],
)
def test_a_run_continues_on_another_number_of_processes(
    tmp_path: Path, before: int, after: int, window: int, batches: int
) -> None:
    """Within an epoch of five batches or at its end, within a window or at its end."""
    path = tmp_path / "x.ckpt"
    options = {"accumulate_grad_batches": window}
    run(Noisy, before, callbacks=[SaveAfter(batches, path)], **options)
    assert_equal(on_one_device(Noisy, **options), run(Noisy, after, ckpt_path=path, **options))


def test_another_count_or_seed_does_not_continue_a_run(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    run(Noisy, 1, callbacks=[SaveAfter(3, path)])
    refuses(lambda: run(Noisy, 1, count=4, ckpt_path=path), "8 virtual devices", "Take count=8")
    L.seed_everything(6, verbose=False)
    refuses(lambda: small_trainer().fit(Noisy(), rows(64, 24), ckpt_path=path), "the seed 5")


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("ddp", "virtual"), ("virtual", "single_device")])
def test_other_strategies_do_not_continue_an_epoch(tmp_path: Path, first: str, second: str) -> None:
    path = tmp_path / "x.ckpt"

    def fit(strategy: str, ckpt_path: Path | None = None, **options: Any) -> None:
        L.seed_everything(1, verbose=False)
        run = trainer(strategy=strategy, devices=1, max_epochs=2, limit_val_batches=0, **options)
        run.fit(Noisy(), rows(64), ckpt_path=ckpt_path)

    fit(first, callbacks=[SaveAfter(2, path)])
    refuses(lambda: fit(second, path), "another strategy", "orders and divides samples in another way")
    fit(first, path)
