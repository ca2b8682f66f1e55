"""Several devices in one process, with a copy of the module on each, end with the bits of one device."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from equipoise import VirtualDevicesStrategy
from equipoise.extensions.virtual.parts.part_shares import PartTimes
from tests.extensions.virtual.test_faults import Averaging, Sparse
from tests.extensions.virtual.test_strategy import (
    Noisy,
    Plain,
    SaveAfter,
    Skipping,
    Weighed,
    assert_equal,
    on_one_device,
    run,
)
from tests.support.trainer_runs import refuses

pytestmark = pytest.mark.filterwarnings("ignore:Sparse [CB]S")


class Recurrent(Noisy):
    """Weights that lie in one block of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(6, 12, 2, batch_first=True, dropout=0.2)
        self.net = nn.Sequential(nn.Linear(12, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(self._computed(batch), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(self._computed(batch), batch_idx)

    def _computed(self, batch: Any) -> Any:
        features, targets = batch
        return self.inner(features[:, None])[0][:, 0], targets


class WithoutSeldom(Recurrent):
    def __init__(self) -> None:
        super().__init__()
        self.seldom_used = nn.Linear(12, 1)


class Seen(Noisy):
    """Notes which module computes each part."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        SEEN.append(self)
        return super().training_step(batch, batch_idx)


SEEN: list[nn.Module] = []


class OtherShares(L.Callback):
    """Shares out the virtual devices in another way after each batch."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        trainer.strategy._strategy.shares = self.choice.choices((1, 2, 5), k=3)


@cache
def on_one(kind: type[Noisy], **options: Any) -> dict[str, Any]:
    return run(kind, 1, **options)


@pytest.mark.parametrize("kind", [Noisy, Weighed, Skipping, WithoutSeldom, Sparse, Averaging])
def test_equal_to_the_bit(kind: type[Noisy]) -> None:
    assert_equal(run(kind, 3, one_process=True), on_one_device(kind))


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
        {"precision": "bf16-mixed"},
        {"count": 5, "shares": (1, 4, 2)},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    expected = {name: value for name, value in options.items() if name != "shares"}
    assert_equal(run(Noisy, 3, one_process=True, **options), on_one(Noisy, **expected))


def test_shares_follow_the_load() -> None:
    assert_equal(run(Noisy, 3, one_process=True, callbacks=[OtherShares(4)]), on_one_device(Noisy))


def test_measured_shares() -> None:
    state = run(Noisy, 3, one_process=True, shares="auto")
    assert_equal(state, on_one_device(Noisy))


def test_devices_finish_together() -> None:
    """A part takes one second on the first device, and three on the second."""
    seconds = [0.0]
    times = PartTimes([torch.device("cpu")] * 2, clock=lambda: seconds[0])
    for step in range(5):
        for place in (0, 0, 1, 1):
            with times.measured(place):
                seconds[0] += 1 + 2 * place
        assert times.end_step(8) == ([6, 2] if step == 4 else None)


def test_fewer_samples_than_virtual_devices() -> None:
    assert_equal(run(Plain, 3, one_process=True, batch_size=28), on_one_device(Plain, batch_size=28))


def test_each_device_has_a_copy() -> None:
    SEEN.clear()
    run(Seen, 3, one_process=True, shares=[1, 1, 2])
    places = [SEEN.index(module) for module in SEEN[:8]]
    SEEN.clear()
    assert places == [0, 0, 2, 2, 4, 4, 4, 4]


@pytest.mark.parametrize("batches", [3, 7])
def test_continues_with_other_devices(tmp_path: Path, batches: int) -> None:
    path = tmp_path / "x.ckpt"
    options: dict[str, Any] = {"accumulate_grad_batches": 3}
    run(Noisy, 3, one_process=True, callbacks=[SaveAfter(batches, path)], **options)
    assert_equal(run(Noisy, 2, one_process=True, ckpt_path=path, **options), on_one(Noisy, **options))


@pytest.mark.slow
def test_continues_in_several_processes(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    run(Noisy, 3, one_process=True, callbacks=[SaveAfter(4, path)])
    assert_equal(run(Noisy, 2, ckpt_path=path), on_one_device(Noisy))


def test_what_is_refused() -> None:
    class Lazy(Noisy):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.LazyLinear(1))

    refuses(lambda: run(Lazy, 2, one_process=True), "net.0 is lazy")
    refuses(lambda: VirtualDevicesStrategy(shares="auto"), "give one_process=True")
    refuses(lambda: run(Noisy, 2, one_process=True, shares=[1, 2, 3]), "3 numbers for 2 devices")
    refuses(lambda: run(Noisy, 3, one_process=True, count=2), "count=2", "3 real ones")
    refuses(lambda: run(Noisy, 2, one_process=True, callbacks=[OtherShares(1)]), "3 numbers for 2 devices")
    refuses(lambda: run(Noisy, 1, callbacks=[OtherShares(1)]), "Set `shares` between two runs")
