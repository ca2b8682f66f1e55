"""Records of memory readings: points in time, and the composition of a peak."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from equipoise.memory.devices import format_bytes

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


@dataclass(frozen=True, kw_only=True)
class MemoryPoint:
    """A reading at the end of a phase.

    Attributes:
        step: `trainer.global_step` when it was taken.
        seconds: Since the run began.
        device: As torch names it; in a run of several processes the rank stands before it, as in "rank 1 cuda:0".
        phase: "batch to device", "forward", "backward", "optimizer step" or "evaluation".
        allocated: Bytes in live tensors; on a CPU, the resident set of the process.
        reserved: Bytes taken by torch's allocator, live or cached; None on a CPU.
        peak: The largest `allocated` within the phase; None where the device keeps none.
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
    """A tensor that was alive.

    Attributes:
        module: The module it belongs to, or in whose forward or backward it was made; empty for the root.
        category: What it is.
        name: Its name, such as "weight", "exp_avg of weight", or the operation that made it.
        shape: Its shape.
        dtype: Its type, without "torch.".
        nbytes: The bytes of its storage. Tensors that share one are told once.
    """

    module: str
    category: Category
    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Composition:
    """All that was alive on a device at one moment; printed, a summary of it.

    Attributes:
        step: `trainer.global_step` at that moment.
        phase: The phase; see `MemoryPoint`.
        device: The device.
        nbytes: The bytes of all holders.
        holders: What was alive, the largest first.
    """

    step: int
    phase: str
    device: str
    nbytes: int
    holders: tuple[TensorRecord, ...]

    def totals(self) -> dict[Category, int]:
        """The bytes of each category, the largest first."""
        totals: dict[Category, int] = defaultdict(int)
        for holder in self.holders:
            totals[holder.category] += holder.nbytes
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        """The bytes of each category, and the ten largest holders."""
        totals = ", ".join(f"{category} {format_bytes(nbytes)}" for category, nbytes in self.totals().items())
        lines = [f"{format_bytes(self.nbytes)} on {self.device} in {self.phase}, step {self.step}: {totals}"]
        for holder in self.holders[:10]:
            name = f"{holder.module}: {holder.name}" if holder.module else holder.name
            shape = f"{list(holder.shape)} {holder.dtype}"
            lines.append(f"{format_bytes(holder.nbytes):>12}  {holder.category:<15}  {name}  {shape}")
        return "\n".join(lines)
