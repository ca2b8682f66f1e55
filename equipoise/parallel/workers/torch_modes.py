"""Torch's global modes, read in one process and set in another.

Float32 precision has two interfaces in torch: `fp32_precision` of each backend and operator, and the older flags. A
reader of the older flags raises once the newer interface was used, so those are taken only where they can be read, and
they are set first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.backends import cuda

__all__ = ["capture", "restore"]

# torch declares no types for the operators of these backends.
cudnn: Any = torch.backends.cudnn
mkldnn: Any = torch.backends.mkldnn

_Read = Callable[[], Any]
_Write = Callable[[Any], Any]


def capture() -> dict[str, Any]:
    """Return torch's modes in this process by name, without the older flags that cannot be read any more."""
    modes: dict[str, Any] = {}
    for name, (read, _) in _MODES.items():
        try:
            modes[name] = read()
        except RuntimeError:
            # The program used the newer interface.
            continue
    return modes


def restore(modes: dict[str, Any]) -> None:
    """Set torch's modes in this process.

    A mode that has its value already is left alone, so that an operator continues following its backend.

    Args:
        modes: Modes by name, as `capture` returned them.
    """
    for name, (read, write) in _MODES.items():
        if name not in modes:
            continue
        try:
            is_set = read() == modes[name]
        except RuntimeError:
            # Another mode of this process has made it unreadable, so it differs.
            is_set = False
        if not is_set:
            write(modes[name])


def _attribute(holder: Any, name: str) -> tuple[_Read, _Write]:
    """Return the reader and the writer of a mode that is an attribute."""

    def read() -> Any:
        return getattr(holder, name)

    def write(value: Any) -> None:
        setattr(holder, name, value)

    return read, write


def _reduction(name: str) -> tuple[_Read, _Write]:
    """Return the reader and the writer of a reduction in half precision, which has two flags."""

    def read() -> Any:
        return getattr(cuda.matmul, name), getattr(cuda.matmul, f"{name}_split_k")

    def write(value: Any) -> None:
        setattr(cuda.matmul, name, value)

    return read, write


# In this order: the older flags before `fp32_precision`, and a backend before its operators, which follow it.
_MODES: dict[str, tuple[_Read, _Write]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn.allow_tf32": _attribute(cudnn, "allow_tf32"),
    "fp32_precision": _attribute(torch.backends, "fp32_precision"),
    "cudnn.fp32_precision": _attribute(cudnn, "fp32_precision"),
    "cuda.matmul.fp32_precision": _attribute(cuda.matmul, "fp32_precision"),
    "cudnn.conv.fp32_precision": _attribute(cudnn.conv, "fp32_precision"),
    "cudnn.rnn.fp32_precision": _attribute(cudnn.rnn, "fp32_precision"),
    # Torch's writer of mkldnn.fp32_precision writes another one; its operators say the same.
    "mkldnn.matmul.fp32_precision": _attribute(mkldnn.matmul, "fp32_precision"),
    "mkldnn.conv.fp32_precision": _attribute(mkldnn.conv, "fp32_precision"),
    "mkldnn.rnn.fp32_precision": _attribute(mkldnn.rnn, "fp32_precision"),
    "cuda.matmul.fp16 reduction": _reduction("allow_fp16_reduced_precision_reduction"),
    "cuda.matmul.bf16 reduction": _reduction("allow_bf16_reduced_precision_reduction"),
    "cuda.matmul.fp16 accumulation": _attribute(cuda.matmul, "allow_fp16_accumulation"),
    "cudnn.enabled": _attribute(cudnn, "enabled"),
    "cudnn.benchmark": _attribute(cudnn, "benchmark"),
    "cudnn.deterministic": _attribute(cudnn, "deterministic"),
    "mkldnn.enabled": _attribute(mkldnn, "enabled"),
    "mkldnn.deterministic": _attribute(mkldnn, "deterministic"),
    "flash attention": (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    "memory-efficient attention": (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    "plain attention": (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    "cudnn attention": (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    "half reduction in attention": (
        cuda.fp16_bf16_reduction_math_sdp_allowed,
        cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
}
