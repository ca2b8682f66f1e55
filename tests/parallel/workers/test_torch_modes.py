"""Torch's modes reach another process as they are, whichever of torch's interfaces has set them."""

from collections.abc import Iterator
from functools import partial

import pytest
from torch import backends
from torch.backends import cuda, cudnn, mkldnn

from equipoise.parallel.workers import torch_modes
from equipoise.parallel.workers.environment import ProcessEnvironment
from equipoise.parallel.workers.launch import launch


@pytest.fixture(autouse=True)
def modes() -> Iterator[None]:
    before = torch_modes.capture()
    yield
    torch_modes.restore(before)


def captured(rank: int) -> dict[str, object]:
    return torch_modes.capture()


def surroundings_after_a_change(rank: int) -> tuple[dict[str, object], ProcessEnvironment]:
    """The modes of a worker that has changed some of them, and what it would send to workers of its own."""
    backends.fp32_precision = "ieee"
    cudnn.conv.fp32_precision = "tf32"
    mkldnn.matmul.fp32_precision = "bf16"
    return torch_modes.capture(), ProcessEnvironment()


def captured_in(surroundings: ProcessEnvironment, rank: int) -> dict[str, object]:
    surroundings.restore()
    return torch_modes.capture()


def test_workers_compute_in_the_precision_of_their_parent() -> None:
    """The parent is itself a process of its own, since such changes cannot be undone."""
    changed, surroundings = launch(surroundings_after_a_change, 1)
    assert changed != torch_modes.capture()
    assert launch(partial(captured_in, surroundings), 1) == changed


def test_every_other_mode_reaches_a_worker() -> None:
    """Each is set to what it was not."""
    flags = [
        (cudnn, "enabled"),
        (cudnn, "benchmark"),
        (cudnn, "deterministic"),
        (mkldnn, "enabled"),
        (cuda.matmul, "allow_fp16_accumulation"),
        (cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        (cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    ]
    before = torch_modes.capture()
    for holder, name in flags:
        setattr(holder, name, not getattr(holder, name))
    cuda.enable_flash_sdp(not cuda.flash_sdp_enabled())
    cuda.enable_mem_efficient_sdp(not cuda.mem_efficient_sdp_enabled())
    cuda.enable_math_sdp(not cuda.math_sdp_enabled())
    cuda.enable_cudnn_sdp(not cuda.cudnn_sdp_enabled())
    changed = torch_modes.capture()
    assert sum(changed[name] != before[name] for name in before) == len(flags) + 4
    assert launch(captured, 1) == changed
