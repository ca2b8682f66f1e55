"""Record of a plan: plain data from which its page is drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

__all__ = ["PlanRecord", "StrategyCurve"]


@dataclass(frozen=True, kw_only=True)
class StrategyCurve:
    """Predicted memory of a strategy.

    Attributes:
        name: Name of the strategy.
        peaks: The peak of its fullest device in bytes, by batch size.
        is_recommended: True for the recommended one. Default: False.
    """

    name: str
    peaks: Mapping[int, int]
    is_recommended: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """Facts of a plan.

    Attributes:
        title: Name of the module.
        written: Time of the page.
        batch_size: Samples of the configured batch.
        limits: Usable bytes by name of the device.
        curves: The strategies that are predicted.
        facts: Names and values for the top of the page. Default: none.
        heads: Heads of the table.
        rows: Its rows, one for each strategy and device.
        recommendation: The recommendation in a sentence.
        overrides: The overrides that choose it, in one text. Default: none.
        notes: What the figures rest on. Default: nothing.
    """

    title: str
    written: datetime
    batch_size: int
    limits: Mapping[str, int]
    curves: Sequence[StrategyCurve]
    facts: Mapping[str, str] = field(default_factory=dict)
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    recommendation: str = ""
    overrides: str = ""
    notes: Sequence[str] = ()
