"""Defects that only GPUs show, as tests on two simulated devices. README.md says which test holds which defect."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise.callbacks.memory.phase_readings import Readings
from equipoise.interop.torch import foreach
from equipoise.memory.devices import peak_of_process
from equipoise.parallel.batches.calibration import Calibration
from equipoise.parallel.batches.gathering import gather
from equipoise.parallel.replicas import coalesced
from tests.simulated.devices.installation import extension
from tests.support.batches import Batches
from tests.support.networks.transparency import Mlp
from tests.support.one_device import assert_same_run
from tests.support.pipelines import fit, pipelined, quiet

FIRST, SECOND, HOST = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
SIZES = [7, 7, 5]
PAGE = Path(__file__).parents[2] / "docs" / "start.md"


# The current device (B) and the current streams (E)


class Noting(Mlp):
    """Notes in each step where its tensors lie, what the current device is, and which stream that device has."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, int, int]] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._note(batch["features"])
        return super().training_step(batch, batch_idx)

    def forward(self, features: Tensor) -> Tensor:
        self._note(features)
        return super().forward(features)

    def _note(self, tensor: Tensor) -> None:
        stream = torch.cuda.current_stream(tensor.device)
        self.seen.add((str(tensor.device), torch.cuda.current_device(), stream.stream_id))


DEVICES = {
    "single_device": ["cuda:1"],
    "dp": ["cuda:1", "cuda:0"],
    "balanced": ["cuda:1", "cuda:0"],
    "pipeline": ["cuda:0", "cuda:1"],
}


def trained(make: Any, strategy: Any, devices: list[str], **options: Any) -> Any:
    torch.manual_seed(3)
    module = make()
    trainer = quiet(accelerator="cuda", strategy=strategy, devices=devices, **options)
    trainer.fit(module, DataLoader(Batches(SIZES), batch_size=None))
    return module


@pytest.mark.parametrize("strategy", DEVICES)
def test_the_current_device_is_that_of_the_data(strategy: str) -> None:
    module = trained(Noting, strategy, DEVICES[strategy])
    assert module.seen
    for device, current, _ in module.seen:
        assert device == f"cuda:{current}"
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("strategy", DEVICES)
def test_threads_compute_on_the_streams_of_their_caller(strategy: str) -> None:
    streams = {str(device): torch.cuda.Stream(device) for device in (FIRST, SECOND)}
    with torch.cuda.stream(streams["cuda:0"]), torch.cuda.stream(streams["cuda:1"]), torch.cuda.device(0):
        module = trained(Noting, strategy, DEVICES[strategy])
    assert module.seen
    for device, _, stream in module.seen:
        assert stream == streams[device].stream_id


# Copies to the CPU (C)


def test_values_that_are_gathered_on_the_host_have_arrived() -> None:
    parts = [torch.ones(2), torch.full((3,), 2.0, device=SECOND), torch.full((1,), 3.0, device=FIRST)]
    assert gather(parts, [2, 3, 1], HOST).tolist() == [1, 1, 2, 2, 2, 3]


def test_a_factor_has_arrived_on_the_host_when_it_multiplies() -> None:
    tensors = [torch.ones(2), torch.ones(2, device=FIRST), torch.ones(2, device=SECOND)]
    foreach.multiply_(tensors, torch.tensor(0.25, device=SECOND))
    assert [tensor.tolist() for tensor in tensors] == [[0.25, 0.25]] * 3


def test_sums_on_the_host_wait_for_what_they_add() -> None:
    rows = [[torch.ones(2), torch.ones(2, device=FIRST)], [torch.ones(1), torch.ones(1, device=FIRST)]]
    assert [total.tolist() for total in coalesced.add_rows(rows, HOST, in_place=True)] == [[2, 2], [2]]


# A layer that two stages call (D)


class CalledTwice(Mlp):
    """Its largest child is a layer that two stages call; the network is the module itself."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.one, self.other, self.head = nn.Linear(30, 30), nn.Linear(30, 30), nn.Linear(30, 4)

    def forward(self, features: Tensor) -> Tensor:
        hidden = torch.tanh(self.other(torch.tanh(self.one(features.flatten(1)))))
        return self.head(torch.tanh(self.one(hidden)))


def test_a_layer_that_two_stages_call_computes_on_the_devices_of_both() -> None:
    expected = fit(CalledTwice, SIZES)
    assert_same_run(expected, fit(CalledTwice, SIZES, **pipelined(2, micro_batches=2, cut_before=["other"])))


# The callback of docs/start.md (H)


class Norms(L.Callback):
    """Keeps what the module has logged."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["gradient_norm"]))


@pytest.mark.parametrize("strategy", DEVICES)
def test_the_callback_of_the_documentation_takes_gradients_of_several_devices(strategy: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (source,) = [block for block in blocks if "class GradientNorm" in block]
    names: dict[str, Any] = {"__name__": "page", "torch": torch}
    exec(compile(source, str(PAGE), "exec"), names)  # noqa: S102
    norms = Norms()
    trained(Mlp, strategy, DEVICES[strategy], callbacks=[names["GradientNorm"](), norms])
    alone = Norms()
    trained(Mlp, "single_device", ["cuda:0"], callbacks=[names["GradientNorm"](), alone])
    assert norms.seen == pytest.approx(alone.seen, rel=1e-12)


# One kernel for a list of gradients (J)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_factor_multiplies_all_gradients_of_a_device_in_one_kernel(dtype: torch.dtype) -> None:
    gradients = [torch.ones(size, dtype=dtype, device=SECOND) for size in range(1, 30)]
    factor = torch.tensor(0.5, dtype=torch.float64, device=SECOND)
    foreach.multiply_(gradients[:1], factor)
    before = extension().launches(1)
    foreach.multiply_(gradients, factor)
    # At most one more, for the factor in the dtype of the gradients.
    assert extension().launches(1) - before == (1 if dtype is factor.dtype else 2)
    assert {value for gradient in gradients[1:] for value in gradient.tolist()} == {0.5}


# Peaks of memory (N): who measures shares, and who reads the memory of phases


MIB = 1 << 20


def hold_for_a_while(mebibytes: int) -> None:
    torch.empty(mebibytes * MIB, dtype=torch.uint8, device=SECOND)


def test_measured_shares_leave_their_peaks_to_readings_of_memory() -> None:
    calibration = Calibration([SECOND], {})
    readings = Readings([SECOND])
    readings.reset()
    hold_for_a_while(5)
    calibration.measured(0, lambda: hold_for_a_while(1), 4)()
    readings.read("forward")
    reading = readings.take()["cuda:1", "forward"]
    assert reading.peak is not None
    assert reading.peak >= reading.allocated + 5 * MIB
    assert (peak_of_process(SECOND) or 0) >= reading.peak


def test_readings_of_memory_leave_their_peaks_to_measured_shares() -> None:
    calibration = Calibration([SECOND], {})
    readings = Readings([SECOND])
    for _ in range(2):
        calibration.measured(0, lambda: hold_for_a_while(4), 4)()
        readings.read("forward")
        readings.read("backward")
        calibration.end_step(4)
    # Each sample needs a MiB, so no more samples fit than the device has MiB.
    most = calibration.times[0].most
    assert most is not None
    assert most <= extension().total_bytes(1) / MIB


class MaskedByDropout(L.LightningModule):
    """Keeps the masks of dropout of all parts of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 1)
        self.dropout = nn.Dropout(0.5)
        self.masks: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        mask = self.dropout(torch.ones_like(batch))
        return {"loss": self.layer(batch * mask).square().mean(), "mask": mask}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.masks.append(outputs["mask"].cpu())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_devices_draw_other_random_numbers() -> None:
    torch.manual_seed(3)
    module = MaskedByDropout()
    trainer = quiet(accelerator="gpu", strategy="dp", devices=2, precision="32-true")
    trainer.fit(module, DataLoader(torch.rand(8, 16), batch_size=8))
    (mask,) = module.masks
    assert not torch.equal(mask[:4], mask[4:])
