"""Peaks of devices: the operations a second that their makers state, dense, without structured sparsity.

Sources: data sheets of NVIDIA's HGX B200, H200, H100, H20, A100, A30, A40, A10, L4, L40, L40S, V100 and T4, and of
AMD's MI300X; the appendices of NVIDIA's papers on the architectures Turing, Ampere, Ada and Blackwell for RTX cards,
with accumulation in float32.
"""

import re
from typing import NamedTuple

import torch

__all__ = ["peak_of"]


class _Peak(NamedTuple):
    """Operations a second of a device in units of 10**12; None where it has no units for them.

    Attributes:
        words: Words of its name, all of which must occur.
        half: Products of float16, and of bfloat16 unless the device is older than that.
        tf32: Products of float32 in TF32.
        single: float32.
        double: float64.
        eight: Products in float8.
    """

    words: str
    half: float
    tf32: float | None
    single: float
    double: float | None = None
    eight: float | None = None


# The first match counts.
_PEAKS = (
    _Peak("B200", 2250, 1125, 75, 37, 4500),
    _Peak("H200 NVL", 835.5, 417.5, 60, 60, 1671),
    _Peak("H200", 989.5, 494.5, 67, 67, 1979),
    _Peak("H100 NVL", 835.5, 417.5, 60, 60, 1671),
    _Peak("H100 PCIE", 756, 378, 51, 51, 1513),
    _Peak("H100", 989.5, 494.5, 67, 67, 1979),
    _Peak("H20", 148, 74, 44, 1, 296),
    _Peak("A100", 312, 156, 19.5, 19.5),
    _Peak("A800", 312, 156, 19.5, 19.5),
    _Peak("A30", 165, 82, 10.3, 10.3),
    _Peak("A40", 149.7, 74.8, 37.4),
    _Peak("A10", 125, 62.5, 31.2),
    _Peak("A6000", 154.8, 77.4, 38.7),
    _Peak("RTX 6000 ADA", 364.2, 182.1, 91.1, None, 728.5),
    _Peak("L40S", 362, 183, 91.6, None, 733),
    _Peak("L40", 181, 90.5, 90.5, None, 362),
    _Peak("L4", 121, 60, 30.3, None, 242),
    _Peak("RTX 5090", 209.5, 104.8, 104.8, None, 419),
    _Peak("RTX 4090", 165.2, 82.6, 82.6, None, 330.3),
    _Peak("RTX 4080", 97.5, 48.7, 48.7, None, 194.9),
    _Peak("RTX 3090 TI", 80, 40, 40),
    _Peak("RTX 3090", 71, 35.6, 35.6),
    _Peak("MI300X", 1307.4, 653.7, 163.4, 163.4, 2614.9),
    _Peak("V100 PCIE", 112, None, 14, 7),
    _Peak("V100 SXM2", 125, None, 15.7, 7.8),
    _Peak("T4", 65, None, 8.1),
    _Peak("RTX 2080 TI", 53.8, None, 13.4),
)
# Words by which devices of one number differ from the plain one.
_VARIANTS = {"TI", "SUPER", "D", "LAPTOP", "MAX", "MOBILE"}


def peak_of(name: str, precision: str) -> float | None:
    """Return the operations a second that a device computes at most; None if they are unknown.

    Args:
        name: The name of the device, such as "NVIDIA A100-SXM4-40GB".
        precision: The precision of the run, such as "bf16-mixed".

    Example:
        >>> peak_of("NVIDIA A100-SXM4-40GB", "bf16-mixed")
        312000000000000.0
    """
    words = set(re.findall(r"[A-Z0-9]+", name.upper()))
    # A slice of a device computes less than the whole.
    if "MIG" in words:
        return None
    for peak in _PEAKS:
        needed = set(peak.words.split())
        if needed <= words and not (words - needed) & _VARIANTS:
            number = _number(peak, precision)
            if number is None:
                return None
            return number * 1e12
    return None


def _number(peak: _Peak, precision: str) -> float | None:
    # 1. Devices without TF32 are older than bfloat16.
    is_old = peak.tf32 is None
    if precision.startswith("bf16") and is_old:
        return None
    if precision.startswith(("bf16", "16")):
        return peak.half
    if precision.startswith("fp8"):
        return peak.eight
    if precision.startswith("64"):
        return peak.double
    # 2. Products of float32 are computed in TF32 where the program allows it.
    # `torch.get_float32_matmul_precision` fails where a program uses the newer setting, which both ways change.
    if not is_old and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return peak.tf32
    return peak.single
