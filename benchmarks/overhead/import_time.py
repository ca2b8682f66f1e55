"""Time of `import equipoise` beside `import torch`, in interpreters of their own."""

import subprocess
import sys
from dataclasses import dataclass
from statistics import median

__all__ = ["ImportTimes", "measure_imports"]

CODE = "from time import process_time; begun = process_time(); import {}; print(process_time() - begun)"


@dataclass(frozen=True)
class ImportTimes:
    """Medians, in seconds of processor time.

    Attributes:
        torch: Of `import torch`.
        equipoise: Of `import equipoise`, which imports torch.
        ratio: The median of the paired ratios.
    """

    torch: float
    equipoise: float
    ratio: float


def measure_imports(rounds: int) -> ImportTimes:
    """Times both imports in turn; the first pair, which fills the disk's cache, does not count.

    Args:
        rounds: How many pairs count.
    """
    counted = [(_seconds("torch"), _seconds("equipoise")) for _ in range(rounds + 1)][1:]
    return ImportTimes(
        torch=median(first for first, _ in counted),
        equipoise=median(second for _, second in counted),
        ratio=median(second / first for first, second in counted),
    )


def _seconds(name: str) -> float:
    return float(
        subprocess.run([sys.executable, "-c", CODE.format(name)], check=True, capture_output=True, text=True).stdout
    )
