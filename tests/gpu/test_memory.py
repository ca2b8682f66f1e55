"""Memory of a GPU: readings, compositions of peaks, evaluations within bounds, and nothing held after a run."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from equipoise import MemoryLogger, NoGradEvaluation, OOMRecovery, RunReport
from equipoise.memory.devices import PeakMeter, list_devices, read_memory, reset_peak
from equipoise.memory.profile.ledger import Ledger
from tests.extensions.pipeline.planning.measured_weights import Assertive, Mixing, check_weights
from tests.gpu.runs import GPU, Classifier, fit
from tests.simulated.devices.installation import is_installed
from tests.support.watched_steps import held_before, mlp, optimizer_of, watched_step

MIB = 2**20


# Readings


def test_devices_are_listed() -> None:
    infos = [info for info in list_devices() if info.device.startswith("cuda")]
    assert [info.index for info in infos] == list(range(torch.cuda.device_count()))
    for info in infos:
        properties = torch.cuda.get_device_properties(info.index)
        assert info.name == properties.name
        assert info.compute_capability == torch.cuda.get_device_capability(info.index)
        assert info.cores == properties.multi_processor_count
        assert info.memory_free is None or 0 <= info.memory_free <= info.memory_total
        assert is_installed() or info.uuid.startswith("GPU-")  # simulated devices have no identifiers


def test_readings_are_those_of_the_allocator() -> None:
    torch.zeros(1, device=GPU)
    reset_peak(GPU)
    before = read_memory(GPU)
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=GPU)
    held = read_memory("cuda")
    assert held.device == str(GPU)
    assert held.allocated - before.allocated == 64 * MIB
    assert held.reserved >= held.allocated == torch.cuda.memory_allocated(GPU)
    del block
    after = read_memory(GPU)
    assert (after.allocated, after.peak) == (before.allocated, held.allocated)
    reset_peak(GPU)
    assert read_memory(GPU).peak == before.allocated


def test_a_meter_measures_what_comes_on_top() -> None:
    torch.cuda.empty_cache()
    reset_peak(GPU)
    block = torch.ones(4 * MIB, device=GPU)  # 16 MiB
    del block
    before = read_memory(GPU)
    with PeakMeter(GPU) as meter:
        block = torch.ones(MIB, device=GPU)
        del block
    assert meter.extra == 4 * MIB
    assert read_memory(GPU).peak == before.peak >= 16 * MIB
    reset_peak(GPU)
    assert read_memory(GPU).peak == before.allocated


def test_the_ledger_finds_the_peak_of_the_allocator() -> None:
    module, batch = mlp()
    module.to(GPU)
    optimizer = optimizer_of(module, "adamw")
    ledger = Ledger(module, [optimizer])
    batch = batch.to(GPU)
    torch.cuda.reset_peak_memory_stats(GPU)
    before = torch.cuda.memory_allocated(GPU)
    watched_step(ledger, module, optimizer, batch)
    peak = ledger.peak("cuda:0")
    truth = torch.cuda.max_memory_allocated(GPU) - before
    assert peak.totals()["gradient"] == sum(parameter.nbytes for parameter in module.parameters())
    # An allocation is rounded up to 512 bytes, and a matrix product may take a workspace once.
    assert peak.nbytes - held_before(peak) == pytest.approx(truth, rel=0.05, abs=40 * MIB)


# Callbacks


class Large(Classifier):
    """Has parameters, and needs activations, that are larger than rounding."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)]
        self.net = nn.Sequential(nn.Flatten(), nn.LazyLinear(256), *layers, nn.Linear(256, 4))
        self.net(torch.zeros(1, 5, 6))


def test_phases_of_a_fit_are_read() -> None:
    memory = MemoryLogger(every_n_steps=1)
    fit(Large, sizes=[512] * 3, callbacks=[memory])
    points = [point for point in memory.timeline if point.device == "cuda:0"]
    assert {"batch to device", "forward", "backward", "optimizer step"} <= {point.phase for point in points}
    for point in points:
        assert point.reserved is not None
        assert point.peak is not None
        assert 0 < point.allocated <= point.reserved
        assert point.allocated <= point.peak
    to_device = [point for point in points if point.phase == "batch to device"]
    forward = [point for point in points if point.phase == "forward"]
    activations = 512 * 256 * 8 * 3
    for before, after in zip(to_device, forward, strict=True):
        assert after.peak is not None
        assert after.peak - before.allocated >= activations


def test_a_report_names_the_devices(tmp_path: Path) -> None:
    fit(Classifier, callbacks=[RunReport(), MemoryLogger(every_n_steps=1), OOMRecovery()], default_root_dir=tmp_path)
    (report,) = tmp_path.rglob("report.html")
    text = report.read_text(encoding="utf-8")
    assert "cuda:0" in text
    assert torch.cuda.get_device_name(0) in text


def test_evaluations_are_bounded() -> None:
    module = nn.Linear(256, MIB // 4, bias=False, device="cuda")  # an output of 4 rows is 4 MiB
    NoGradEvaluation([torch.ones(4, 256)], collect=True).run(module)  # the workspace of cuBLAS stays
    few = NoGradEvaluation([torch.ones(4, 256)] * 2, collect=True).run(module).memory
    many = NoGradEvaluation([torch.ones(4, 256)] * 20, collect=True).run(module).memory
    assert 4 * MIB <= many <= few < 16 * MIB


# Nothing is held


class Readings(Callback):
    """Notes the bytes in live tensors at the end of each batch."""

    def __init__(self) -> None:
        self.allocated: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.allocated.append(torch.cuda.memory_allocated(GPU))


def collected() -> int:
    """Return the bytes in live tensors, without the workspaces that libraries keep for each thread and stream."""
    gc.collect()
    torch.cuda.synchronize()
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    return torch.cuda.memory_allocated(GPU)


@pytest.mark.parametrize(
    ("strategy", "parts"), [("single_device", 1), ("dp", 2), ("balanced", 2), ("pipeline", 2)], ids=lambda value: value
)
def test_memory_does_not_grow_and_is_free_after_a_run(strategy: str, parts: int) -> None:
    fit(Large, strategy=strategy, parts=parts, sizes=[64])  # libraries take their workspaces
    before = collected()
    readings = Readings()
    module, _, trainer = fit(Large, strategy=strategy, parts=parts, sizes=[64] * 12, callbacks=[readings])
    # Some logged numbers come and go.
    assert abs(readings.allocated[-1] - readings.allocated[2]) < 8192
    del module, trainer, readings
    assert collected() == before


@pytest.mark.not_simulated("no cache")
def test_the_cache_of_the_allocator_is_given_back_after_a_run() -> None:
    fit(Large, sizes=[64])
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(GPU)
    fit(Large, sizes=[4096] * 2)
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(GPU) == before


def test_a_failed_run_holds_nothing() -> None:
    class Failing(Large):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise ValueError("planned")
            return loss

    fit(Large, sizes=[64])
    before = collected()
    with pytest.raises(ValueError, match="planned"):
        fit(Failing, sizes=[64] * 3)
    assert collected() == before


# Stages


@pytest.mark.parametrize(("kind", "is_trained"), [(Mixing, True), (Assertive, False)])
def test_weights_are_no_activations_on_another_device(kind: type[Mixing], is_trained: bool) -> None:
    """A pipeline measures the calls of a network on the first device before its layers are placed."""
    check_weights(kind, is_trained, GPU)
