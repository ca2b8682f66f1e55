"""A device whose memory is really too small: the step is done again in smaller parts, and computes the same."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch

from equipoise import (
    BalancedDataParallelStrategy,
    DataParallelStrategy,
    OOMRecovery,
    PipelineStrategy,
    Strategy,
)
from tests.simulated.devices.installation import extension
from tests.simulated.devices.selection import on_the_host
from tests.simulated.wide import SIZES, Second, Wide
from tests.support.pipelines import fit

pytestmark = pytest.mark.filterwarnings(
    r"ignore:Batch \d of \d+ samples.* ran out of memory", "ignore:.* ran out of memory and receives fewer samples"
)


@pytest.fixture(autouse=True)
def without_limits() -> Iterator[None]:
    yield
    for index in range(extension().device_count()):
        extension().set_limit(index, 0)


STRATEGIES: dict[str, tuple[Callable[[], Strategy | str], list[str]]] = {
    "single_device": (lambda: "single_device", ["cuda:1"]),
    "dp": (DataParallelStrategy, ["cuda:1", "cuda:0"]),
    "dp forward": (lambda: DataParallelStrategy(parallelize="forward"), ["cuda:0", "cuda:1"]),
    "dp on one device": (DataParallelStrategy, ["cuda:1", "cuda:1"]),
    "balanced": (lambda: BalancedDataParallelStrategy(shares=[1, 1]), ["cuda:0", "cuda:1"]),
    "pipeline": (lambda: PipelineStrategy(micro_batches=2, cut_before=["net.4"]), ["cuda:0", "cuda:1"]),
    "pipeline on one device": (lambda: PipelineStrategy(micro_batches=2, cut_before=["net.4"]), ["cuda:1", "cuda:1"]),
}
CASES = [(name, int(device[-1])) for name, (_, devices) in STRATEGIES.items() for device in sorted(set(devices))]


@pytest.mark.parametrize(("name", "device"), CASES)
def test_a_step_is_done_again_where_memory_runs_out(name: str, device: int) -> None:
    make, devices = STRATEGIES[name]

    def train(used: list[str], *callbacks: L.Callback) -> Any:
        options = {"accelerator": "auto", "strategy": make(), "devices": used, "callbacks": list(callbacks)}
        module, _, _ = fit(Wide, SIZES, reads_gradients=False, **options)
        return module

    with on_the_host():
        expected = train(["cpu"] * len(devices))
    unlimited = Second(device)
    train(devices, unlimited)
    recovery = OOMRecovery()
    module = train(devices, recovery, Second(device, unlimited.needed))
    assert {event.device for event in recovery.events} == {f"cuda:{device}"}
    for (name, value), other in zip(expected.named_parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(other.cpu(), value, rtol=1e-12, atol=1e-12, msg=name)
