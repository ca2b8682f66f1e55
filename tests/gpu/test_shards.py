"""Shards on a GPU, and over a mesh of two GPUs: equal to one CPU, in float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks.gpu.measuring import Setting
from benchmarks.gpu.meshes import meshes
from equipoise import FSDPStrategy, Trainer
from tests.extensions.fsdp.context.networks import Gpt, Task, samples
from tests.extensions.fsdp.mesh_modules import Cut
from tests.extensions.fsdp.programs import STEP, Net, assert_close, loader, make, weights_of
from tests.gpu.runs import CPU, GPU, QUIET

pytestmark = pytest.mark.not_simulated("no NCCL")

SECOND_GPU = torch.device("cuda", 1)
# Kernels of a GPU add numbers in another order than the CPU.
TOLERANCE = 1e-10

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def fit(strategy: Any, devices: list[torch.device], kind: Any = Net, data: Any = None, **options: Any) -> Any:
    """Return the weights after two epochs, of twelve samples in a step unless there are other data."""
    module = make(kind)
    options = {"precision": "64-true", "max_epochs": 2, **QUIET, **options}
    Trainer(strategy=strategy, devices=devices, **options).fit(module, data or loader(49, STEP))
    return {name: value.cpu() for name, value in weights_of(module).items()}


@pytest.mark.parametrize(
    ("cpu_offload", "options"),
    [(False, {}), (True, {}), (False, {"gradient_clip_val": 0.05}), (False, {"accumulate_grad_batches": 2})],
    ids=str,
)
def test_one_gpu(cpu_offload: bool, options: dict[str, Any]) -> None:
    expected = fit("single_device", [CPU], **options)
    assert_close(expected, fit(FSDPStrategy(cpu_offload=cpu_offload), [GPU], **options), TOLERANCE)


def test_a_checkpoint_of_shards_is_read_by_a_cpu(tmp_path: Path) -> None:
    expected = fit("single_device", [CPU])
    module = make(Net)
    options = {"precision": "64-true", **QUIET}
    sharded = Trainer(strategy=FSDPStrategy(), devices=[GPU], max_epochs=1, **options)
    sharded.fit(module, loader(49, STEP))
    sharded.save_checkpoint(tmp_path / "first.ckpt")
    module = make(Net)
    whole = Trainer(devices=[CPU], max_epochs=2, **options)
    whole.fit(module, loader(49, STEP), ckpt_path=tmp_path / "first.ckpt")
    assert_close(expected, weights_of(module), TOLERANCE)


# Two GPUs. Not run: no machine with two was at hand.


@needs_two_gpus
@pytest.mark.parametrize(("data", "tensor"), [(2, 1), (1, 2)])
def test_two_gpus(data: int, tensor: int) -> None:
    expected = fit("single_device", [CPU])
    strategy = FSDPStrategy(data=data, tensor=tensor)
    # Each row of processes has data of its own.
    actual = fit(strategy, [GPU, SECOND_GPU], Cut, loader(49, STEP // data))
    assert_close(expected, actual, TOLERANCE)


@needs_two_gpus
def test_sequences_divided_over_two_gpus() -> None:
    """Ten steps with four sequences each."""
    sequences: Any = DataLoader(samples(20), batch_size=4)  # type: ignore[arg-type]
    expected = fit("single_device", [CPU], lambda: Task(Gpt()), sequences)
    actual = fit(FSDPStrategy(context=2), [GPU, SECOND_GPU], lambda: Task(Gpt()), sequences)
    assert_close(expected, actual, TOLERANCE)


@needs_two_gpus
def test_the_peak_of_divided_sequences_is_predicted() -> None:
    rows = list(meshes(Setting.find(is_small=False, is_simulated=False)))
    assert rows
    assert [row.what for row in rows if row.is_kept is False] == []
