"""Several devices in one process, with a copy of the module on each, end with the bits of one device."""

import random
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from equipoise import BalancedDataParallelStrategy, VirtualDevicesStrategy
from equipoise.extensions.virtual.parts.part_shares import PartTimes
from tests.extensions.virtual.modules import Noisy, Plain, Skipping, Sparse, Stateful, Weighed
from tests.extensions.virtual.runs import OF_DEVICES, SaveAfter, on_one_device, run
from tests.support.equality import assert_equal
from tests.support.trainer_runs import Small, loader, refuses, trainer

pytestmark = pytest.mark.filterwarnings("ignore:Sparse [CB]S")


class OtherShares(L.Callback):
    """Shares out the virtual devices in another way after each batch."""

    def __init__(self, seed: int) -> None:
        self.choice = random.Random(seed)

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        trainer.strategy._strategy.shares = self.choice.choices((1, 2, 5), k=3)


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a clipped window": (Noisy, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
    "bfloat16": (Noisy, {"precision": "bf16-mixed"}),
    "other shares and count": (Noisy, {"count": 5, "shares": (1, 4, 2)}),
    "measured shares": (Noisy, {"shares": "auto"}),
    "shares that change": (Noisy, {"callbacks": [OtherShares(4)]}),
    "loss weights": (Weighed, {}),
    "parts without a loss": (Skipping, {}),
    "sparse and strided gradients": (Sparse, {}),
    "buffers and attributes that the step changes": (Stateful, {}),
    "fewer samples than virtual devices": (Plain, {"batch_size": 28}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", RUNS)
def test_devices_of_one_process_have_the_bits_of_one_device(name: str) -> None:
    kind, options = RUNS[name]
    alone = {option: value for option, value in options.items() if option not in (*OF_DEVICES, "callbacks")}
    assert_equal(on_one_device(kind, **alone), run(kind, 3, one_process=True, **options))


def test_shares_follow_the_measured_times() -> None:
    """A part takes one second on the first device, and three on the second, so that both finish together."""
    seconds = [0.0]
    times = PartTimes([torch.device("cpu")] * 2, clock=lambda: seconds[0])
    for step in range(5):
        for place in (0, 0, 1, 1):
            with times.measured(place):
                seconds[0] += 1 + 2 * place
        assert times.end_step(8) == ([6, 2] if step == 4 else None)


def test_shares_are_set_by_callbacks() -> None:
    class Sharing(L.Callback):
        def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
            trainer.strategy.shares = [1, 3]

    for strategy in (VirtualDevicesStrategy(count=4, one_process=True), BalancedDataParallelStrategy(shares=[1, 1])):
        trainer(strategy=strategy, devices=2, callbacks=[Sharing()]).fit(Small(), loader(2, 8))
        assert strategy.shares == [1, 3]


SEEN: list[nn.Module] = []


class Seen(Noisy):
    """Notes which module computes each part."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        SEEN.append(self)
        return super().training_step(batch, batch_idx)


def test_each_device_has_a_copy_of_the_module() -> None:
    SEEN.clear()
    run(Seen, 3, one_process=True, shares=[1, 1, 2])
    places = [SEEN.index(module) for module in SEEN[:8]]
    SEEN.clear()
    assert places == [0, 0, 2, 2, 4, 4, 4, 4]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("batches", "continued"),
    [(3, {"one_process": True}), (7, {"one_process": True}), pytest.param(4, {}, marks=pytest.mark.slow)],
)
def test_a_run_continues_on_other_devices(tmp_path: Path, batches: int, continued: dict[str, Any]) -> None:
    """Within an epoch of five batches and a window of three, and in several processes."""
    path = tmp_path / "x.ckpt"
    options: dict[str, Any] = {"accumulate_grad_batches": 3}
    run(Noisy, 3, one_process=True, callbacks=[SaveAfter(batches, path)], **options)
    assert_equal(on_one_device(Noisy, **options), run(Noisy, 2, ckpt_path=path, **continued, **options))


class Lazy(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(1))


@pytest.mark.parametrize(
    ("kind", "devices", "options", "words"),
    [
        (Lazy, 2, {}, ["net.0 is lazy"]),
        (Noisy, 2, {"callbacks": [OtherShares(1)]}, ["3 numbers for 2 devices"]),
        (Noisy, 1, {"one_process": False, "callbacks": [OtherShares(1)]}, ["Set `shares` between two runs"]),
    ],
)
def test_runs_that_are_refused(kind: Any, devices: int, options: dict[str, Any], words: list[str]) -> None:
    refuses(lambda: run(kind, devices, **{"one_process": True, **options}), *words)


def test_a_launcher_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "1"}
    for name, value in {**values, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        monkeypatch.setenv(name, value)
    strategy = VirtualDevicesStrategy(one_process=True)
    refuses(lambda: strategy.connect([torch.device("cpu")] * 2, 2), "a launcher has started 2")
