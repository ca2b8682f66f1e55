"""Time of `import equipoise` beside `import torch`, one after the other in an interpreter of their own."""

import subprocess
import sys
from dataclasses import dataclass
from statistics import median

__all__ = ["ImportTimes", "measure_imports"]

CODE = """
from time import process_time
times = [process_time()]
import torch
times.append(process_time())
import equipoise
times.append(process_time())
print(*times)
"""


@dataclass(frozen=True)
class ImportTimes:
    """Medians, in seconds of processor time.

    Attributes:
        torch: Of `import torch`.
        equipoise: Of `import equipoise`, which imports torch.
        ratio: The median of the ratios within an interpreter.
    """

    torch: float
    equipoise: float
    ratio: float


def measure_imports(rounds: int) -> ImportTimes:
    """Time both imports in each interpreter; the first one, which fills the disk's cache, does not count.

    Args:
        rounds: How many interpreters count.
    """
    counted = [_seconds() for _ in range(rounds + 1)][1:]
    return ImportTimes(
        torch=median(first for first, _ in counted),
        equipoise=median(second for _, second in counted),
        ratio=median(second / first for first, second in counted),
    )


def _seconds() -> tuple[float, float]:
    printed = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout
    begun, with_torch, with_both = map(float, printed.split())
    return with_torch - begun, with_both - begun
