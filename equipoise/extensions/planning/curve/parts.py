"""Parts of a recorded step, and the peak that follows from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from equipoise.extensions.planning.description.loads import Part
from equipoise.memory.records import Category

__all__ = ["Holder", "PhaseStart", "PredictedPeak"]


class Holder(NamedTuple):
    """Storage of a recorded step.

    Attributes:
        category: Its category.
        module: Name of the module that it belongs to, or that created it.
        size: Index of its size among those of the curve.
    """

    category: Category
    module: str
    size: int


class PhaseStart(NamedTuple):
    """Beginning of a phase.

    Attributes:
        phase: "forward", "backward" or "optimizer step".
        event: Number of the events before it.
    """

    phase: str
    event: int


@dataclass(frozen=True, kw_only=True)
class PredictedPeak:
    """Predicted peak of one device.

    Attributes:
        nbytes: Bytes at the peak.
        phase: The phase of the peak.
        parts: Bytes by kind, the largest first: "parameter", "gradient", "optimizer state", "activation",
            "temporary", "batch", "buffer"; under several devices also "bucket" and "copy".
        phases: The peak of each phase in bytes.
    """

    nbytes: int
    phase: str
    parts: Mapping[Part, int]
    phases: Mapping[str, int]
