"""Item 15: sequences that are divided over two GPUs, and layers that are cut over them."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.device_mesh.memory import PLAN, VOCABULARY, Language
from benchmarks.gpu.campaign import Row
from benchmarks.gpu.measuring import Setting
from benchmarks.gpu.memory import MIB
from benchmarks.gpu.networks import QUIET
from benchmarks.gpu.predictions import MOST_ERROR, ROUNDING, WORKSPACES, AllocatedPeak
from benchmarks.gpu.steps import quiet
from equipoise import FSDPStrategy, Trainer
from equipoise.extensions.planning import PlannedDevice, plan_strategies, predict_memory

__all__ = ["meshes"]

MESHES: dict[str, dict[str, Any]] = {
    "fsdp alone": {},
    "context 2": {"context": 2},
    "tensor 2": {"tensor": 2, "tensor_plan": PLAN},
}
STEPS = 10
MOST_DIFFERENCE = 1e-10


class PeakOfAll(AllocatedPeak):
    """Measures the peak of one step in each process.

    Attributes:
        of_all: The peaks in bytes, by rank.
    """

    of_all: Sequence[int] = ()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin, on the device of this process."""
        self.device = trainer.strategy.root_device
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Gather what the processes have measured."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if trainer.world_size > 1:
            found: list[Any] = [None] * trainer.world_size
            dist.all_gather_object(found, self.nbytes)
            self.of_all = found


def meshes(setting: Setting) -> Iterator[Row]:
    """Compare meshes of two GPUs with one GPU, and their peaks with predicted ones."""
    quiet()
    count = torch.cuda.device_count()
    if count < 2 or setting.is_simulated:
        reason = "simulated devices have no NCCL" if setting.is_simulated else f"there is {count}"
        yield Row("two GPUs", f"not run: {reason}")
        return
    devices = [torch.device("cuda", index) for index in range(2)]
    # 1. Weights, in float64.
    expected, _ = trained("single_device", devices[:1], setting.pick(512, 32), 2, "64-true")
    for name, options in MESHES.items():
        rows = 1 if len(options) else 2
        weights, _ = trained(FSDPStrategy(**options), devices, setting.pick(512, 32), 2 // rows, "64-true")
        largest = max(float((weights[key] - expected[key]).abs().max()) for key in expected)
        yield Row.at_most(f"{name}: largest difference of weights after {STEPS} steps", largest, MOST_DIFFERENCE)
    # 2. Peaks of long sequences. Whole ones, with which the first batch would be compared, shall not be in memory.
    tokens = setting.pick(2**14, 64)
    for name, options in MESHES.items():
        strategy = FSDPStrategy(compare_layers=False, **options)
        _, peaks = trained(strategy, devices, tokens, 1, "32-true")
        for rank, peak in enumerate(peaks):
            yield Row(f"{name}, {tokens} tokens: peak of GPU {rank}", peak / MIB, "MiB")
        predicted = predicted_peak(options, tokens)
        if predicted is not None:
            is_kept = abs(max(peaks) - predicted) <= MOST_ERROR * predicted + WORKSPACES
            judged = None if setting.is_small else is_kept
            yield Row(f"{name}: measured by predicted", max(peaks) / predicted, "", "within 5% and 64 MiB", judged)


def trained(
    strategy: Any, devices: list[torch.device], tokens: int, batch_size: int, precision: Any
) -> tuple[dict[str, Tensor], Sequence[int]]:
    """Return the weights after ten steps, and the peaks of the processes."""
    draw = torch.Generator().manual_seed(1)
    sequences = torch.randint(VOCABULARY, (2 * STEPS, tokens + 1), generator=draw)
    torch.manual_seed(3)
    module = Language()
    peak = PeakOfAll(devices[0])
    options: dict[str, Any] = {**QUIET, "max_steps": STEPS, "max_epochs": None, "precision": precision}
    trainer = Trainer(strategy=strategy, devices=devices, callbacks=[peak], **options)
    pairs: Any = [(row[:-1], row[1:]) for row in sequences]
    trainer.fit(module, DataLoader(pairs, batch_size=batch_size))
    return {name: weight.detach().cpu() for name, weight in module.named_parameters()}, peak.of_all


def predicted_peak(options: dict[str, Any], tokens: int) -> int | None:
    """Return the predicted bytes of each GPU; None if they are not predicted."""
    batch = torch.zeros(1, tokens, dtype=torch.int64)
    module = Language()
    prediction = predict_memory(module, (batch, batch), device="cuda")
    gpus = [PlannedDevice(name="GPU", kind="cuda", memory=2**40)] * 2
    assert gpus[0].rounding == ROUNDING
    (plan,) = plan_strategies(prediction, module, [FSDPStrategy(**options)], gpus)
    return plan.devices[0].peak.nbytes if plan.devices else None
