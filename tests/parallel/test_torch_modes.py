"""Torch's modes reach another process as they are, whichever of torch's interfaces has set them."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from torch.backends import cuda, cudnn, mkldnn

from equipoise.parallel import torch_modes
from equipoise.parallel.launch import launch


@pytest.fixture(autouse=True)
def modes() -> Iterator[None]:
    before = torch_modes.capture()
    yield
    torch_modes.restore(before)


def captured(rank: int) -> dict[str, object]:
    return torch_modes.capture()


def launched_with(changes: str) -> tuple[object, object]:
    """The modes of a program of its own, and of its first worker; it cannot spoil those of the tests."""
    code = (
        "import sys; from tests.parallel.test_torch_modes import captured; from equipoise.parallel import torch_modes\n"
        "from equipoise.parallel.launch import launch\nimport torch\nfrom torch.backends import cuda, cudnn, mkldnn\n"
        f"{changes}\nfound = launch(captured, 1)\nown = torch_modes.capture()\n"
        "print(found == own or (found, own))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout.strip() or done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        "cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.fp32_precision = 'ieee'\ncudnn.conv.fp32_precision = 'tf32'\n"
        "mkldnn.matmul.fp32_precision = 'bf16'",
    ],
)
def test_workers_compute_in_the_precision_of_their_parent(changes: str) -> None:
    assert launched_with(changes) == (0, "True")


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
