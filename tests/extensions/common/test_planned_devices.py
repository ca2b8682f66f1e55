"""Descriptions of devices, and what strategies say that theirs hold."""

from typing import Any

import pytest
import torch
from torch import nn

from equipoise import ConfigurationError
from equipoise.extensions.common import planned_devices
from equipoise.extensions.common.planned_devices import GPU_MEMORY, PlannedDevice
from equipoise.extensions.planning import StepFacts, describe_devices
from equipoise.extensions.planning.description.strategies import device_loads
from equipoise.strategies import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    DDPStrategy,
    FSDPStrategy,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "memories"),
    [
        ("2x24GiB", [24, 24]),
        ("[40GiB,12GiB]", [40, 12]),
        (["40 GiB", "3 * 8G"], [40, 8, 8, 8]),
        ("2xA100-80GB", [80, 80]),
        ("NVIDIA GeForce RTX 3090", [24]),
        ("512MiB", [0.5]),
    ],
)
def test_devices_are_described_by_memory_or_name(text: Any, memories: list[float]) -> None:
    devices = describe_devices(text)
    assert [device.memory / GIB for device in devices] == memories
    assert all(0 < device.usable < device.memory or device.memory < GIB for device in devices)


def test_devices_of_this_machine() -> None:
    (cpu,) = describe_devices(["cpu"])
    assert cpu.kind == "cpu"
    assert 0 < cpu.usable <= cpu.memory
    both = describe_devices("2xcpu")
    assert [device.memory for device in both] == [cpu.memory // 2] * 2


@pytest.mark.parametrize("count", [1, 2, "1", "2"])
def test_a_number_means_the_first_gpus_of_this_machine(count: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    present = describe_devices("[24GiB, 12GiB]")
    monkeypatch.setattr(planned_devices, "_of_this_machine", lambda: present)
    assert describe_devices(count) == present[: int(count)]
    with pytest.raises(ConfigurationError, match="more GPUs than the 2 of this machine"):
        describe_devices(3)


def test_a_number_means_parts_of_a_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert len(describe_devices("24")) == 24


@pytest.mark.parametrize("text", ["0x24GiB", "A100-90GB", "cuda:77", "", "-3", "0GiB", "9999x1GiB"])
def test_impossible_devices_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        describe_devices(text)
    assert str(caught.value).endswith((".", "?"))


def test_names_of_gpus_are_found_in_any_spelling() -> None:
    for name, memory in GPU_MEMORY.items():
        (device,) = describe_devices(name.lower().replace("-", " "))
        assert device.memory == memory * GIB


FACTS = StepFacts(parameters=1000, gradients=900, optimizer_state=1800, buffers=10)


def devices(*gibibytes: float) -> list[PlannedDevice]:
    return [PlannedDevice(name=f"gpu {n}", kind="cuda", memory=int(size * GIB)) for n, size in enumerate(gibibytes)]


def test_every_sample_is_on_one_device() -> None:
    module = nn.Linear(3, 3)
    for strategy in (
        DataParallelStrategy(),
        BalancedDataParallelStrategy(),
        BalancedDataParallelStrategy(shares=[1, 4]),
    ):
        planned = device_loads(strategy, devices(24, 12), module, FACTS)
        for batch_size in (1, 7, 100):
            assert sum(load.samples(batch_size) for load in planned.loads) == batch_size
    assert planned.loads[1].samples(100) == 80
    first_has_ten = BalancedDataParallelStrategy(first_device_batch_size=10)
    planned = device_loads(first_has_ten, devices(24, 12), module, FACTS)
    assert [load.samples(100) for load in planned.loads] == [10, 90]


def test_balanced_gives_more_to_the_larger_device() -> None:
    planned = device_loads(BalancedDataParallelStrategy(), devices(24, 12), nn.Linear(3, 3), FACTS)
    first, second = (load.samples(300) for load in planned.loads)
    assert 2 * second <= first + 2


def test_buckets_hold_the_gradients() -> None:
    module = nn.Linear(10, 10).double()
    nbytes = 110 * 8
    two = devices(24, 24)
    views = device_loads(DDPStrategy(), two, module, FACTS)
    assert views.batches == 2
    assert views.loads[0].added("forward") == nbytes
    assert views.loads[0].factor("gradient", "backward") == 0
    native = device_loads(DDPStrategy(engine="native"), two, module, FACTS).loads[0]
    shares = [native.factor("gradient", phase) for phase in ("forward", "backward", "optimizer step")]
    assert shares == [0, 1, 0]
    copies = device_loads(DDPStrategy(gradient_as_bucket_view=False), two, module, FACTS).loads[0]
    assert copies.factor("gradient", "forward") == 1
    alone = device_loads(DDPStrategy(), two[:1], module, FACTS).loads[0]
    assert alone.added("forward") == 0


def test_shards_share_the_weights() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)))
    four = devices(24, 24, 24, 24)
    sharded = device_loads(FSDPStrategy(), four, module, FACTS)
    assert sharded.loads[0].factor("parameter", "forward") == 1 / 4
    *units, root = sharded.loads[0].units
    assert units == [(str(index), 72 * 4, 72 * 4) for index in range(4)]
    assert root == ("", 0, 0)
    kept = device_loads(FSDPStrategy(reshard_after_forward=False), four, module, FACTS)
    assert sharded.note is not None
    assert (
        kept.note
        == f"{sharded.note}, and units are freed after their forwards, as they are without reshard_after_forward"
    )


def test_a_unit_inside_another_is_a_part_of_it() -> None:
    frozen = nn.Linear(8, 8).requires_grad_(False)
    module = nn.Sequential(nn.Sequential(nn.Sequential(frozen, nn.ReLU()), nn.Linear(8, 8)), nn.Linear(8, 4))
    sharded = device_loads(FSDPStrategy(units=["0", "0.0"]), devices(24, 24), module, FACTS)
    assert list(sharded.loads[0].units) == [("0", 2 * 72 * 4, 72 * 4), ("", 36 * 4, 36 * 4)]


@pytest.mark.parametrize(
    "strategy",
    [DataParallelStrategy(parallelize="forward"), FSDPStrategy(cpu_offload=True)],
)
def test_strategies_that_are_not_predicted_are_refused(strategy: Any) -> None:
    with pytest.raises(ConfigurationError):
        device_loads(strategy, devices(24, 24), nn.Linear(2, 2), FACTS)
