"""Records of memory readings: points in time, and the composition of a peak."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from equipoise.formats import format_bytes

__all__ = ["CATEGORIES", "Category", "Composition", "MemoryPoint", "TensorRecord"]

Category = Literal["parameter", "buffer", "gradient", "optimizer state", "activation", "batch", "temporary"]

CATEGORIES: tuple[Category, ...] = (
    "parameter",
    "buffer",
    "gradient",
    "optimizer state",
    "activation",
    "batch",
    "temporary",
)

# Tensors that a printed composition lists.
_LISTED = 10


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """Reading of memory at the end of a phase.

    Attributes:
        step: `trainer.global_step` at that moment.
        seconds: Time since the run began.
        device: Name of the device in torch; in a run of several processes after the rank, as in "rank 1 cuda:0".
        phase: "batch to device", "forward", "backward", "optimizer step" or "evaluation".
        allocated: Bytes in live tensors; on a CPU, the resident set of the process.
        reserved: Bytes that torch's allocator holds, live or cached; None on a CPU.
        peak: The largest `allocated` within the phase; None if the device keeps none.
    """

    step: int
    seconds: float
    device: str
    phase: str
    allocated: int
    reserved: int | None
    peak: int | None


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """Record of a live tensor.

    Attributes:
        module: Name of the module that it belongs to, or whose forward or backward created it; empty for the root.
        category: Its category, one of `CATEGORIES`.
        name: Its name, such as "weight", "exp_avg of weight", or the operation that created it.
        shape: Its shape.
        dtype: Its type, without "torch.".
        nbytes: Bytes of its storage. Tensors that share a storage have one record.
    """

    module: str
    category: Category
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Composition:
    """Live tensors of a device at one moment; `str` returns a summary.

    Attributes:
        step: `trainer.global_step` at that moment.
        phase: The phase; see `MemoryPoint`.
        device: Name of the device.
        nbytes: Bytes of all tensors.
        holders: Records of the tensors, the largest first.
    """

    step: int
    phase: str
    device: str
    nbytes: int
    holders: tuple[TensorRecord, ...]

    def totals(self) -> dict[Category, int]:
        """Return the bytes of each category, the largest first."""
        totals: dict[Category, int] = defaultdict(int)
        for record in self.holders:
            totals[record.category] += record.nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        """Return the bytes of each category, and the ten largest tensors."""
        totals = ", ".join(f"{category} {format_bytes(nbytes)}" for category, nbytes in self.totals().items())
        lines = [f"{format_bytes(self.nbytes)} on {self.device} in {self.phase}, step {self.step}: {totals}"]
        for record in self.holders[:_LISTED]:
            name = record.name
            # The root has no name.
            if record.module:
                name = f"{record.module}: {record.name}"
            shape = f"{list(record.shape)} {record.dtype}"
            lines.append(f"{format_bytes(record.nbytes):>12}  {record.category:<15}  {name}  {shape}")
        return "\n".join(lines)
