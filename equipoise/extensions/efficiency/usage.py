"""Usage: the values of a run or an epoch."""

from dataclasses import dataclass, fields

from equipoise.formats import format_count

__all__ = ["Usage", "energy", "operations"]

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Values of a run, an epoch, or another time.

    Attributes:
        seconds: Duration of the training, without validations.
        samples: Samples of all processes; 0 if the size of a batch was unknown.
        batches: Batches of each process.
        tokens: Tokens of all processes.
        operations: Floating point operations of all processes; 0 if they were not counted.
        peak: Operations a second of all devices at most; None if unknown.
        joules: Energy, with that of validations; None where no meter is.
    """

    seconds: float
    samples: float
    batches: float
    tokens: float
    operations: float
    peak: float | None = None
    joules: float | None = None

    def since(self, earlier: "Usage | None") -> "Usage":
        """Return the values of the time after an earlier moment."""
        if earlier is None:
            return self
        values = {}
        for field in fields(self):
            value = getattr(self, field.name)
            before = getattr(earlier, field.name)
            # The peak is no sum.
            if value is not None and before is not None and field.name != "peak":
                value -= before
            values[field.name] = value
        # The size of a batch has become unknown.
        values["samples"] = max(values["samples"], 0.0)
        return Usage(**values)

    def values(self) -> dict[str, float]:
        """Return the values that are known, by names.

        Example:
            >>> Usage(seconds=2.0, samples=8, batches=2, tokens=0, operations=6e12, peak=12e12).values()
            {'samples_per_second': 4.0, 'operations_per_second': 3000000000000.0, 'utilisation': 0.25}
        """
        # Before the end of the first steps nothing is measured.
        if self.seconds <= 0:
            return {}
        values = {
            "samples_per_second": self.samples / self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "operations_per_second": self.operations / self.seconds,
        }
        if self.peak:
            values["utilisation"] = values["operations_per_second"] / self.peak
        if self.joules is not None:
            values["joules"] = self.joules
        return {name: value for name, value in values.items() if value}

    def rows(self) -> dict[str, str]:
        """Return the lines of a summary; `RunSummary` has samples a second already."""
        values = self.values()
        rows = {}
        # A value that is unknown has no row.
        if "tokens_per_second" in values:
            rows["tokens per second"] = format_count(values["tokens_per_second"])
        if "operations_per_second" in values:
            rows["operations"] = f"{operations(values['operations_per_second'])}/s"
        if "utilisation" in values:
            rows["share of the peak"] = f"{values['utilisation']:.1%}"
        if "joules" in values:
            rows["energy"] = energy(values["joules"])
        return rows


def operations(count: float) -> str:
    """Return a number of floating point operations with a prefix.

    Example:
        >>> operations(3.25e12)
        '3.25 TFLOP'
    """
    return f"{_prefixed(count)}FLOP"


def energy(joules: float) -> str:
    """Return an energy in joules, or in kilowatt hours from one tenth of them on.

    Example:
        >>> energy(1500.0), energy(7.2e6)
        ('1.5 kJ', '2 kWh')
    """
    hours = joules / 3.6e6
    if hours >= 0.1:
        return f"{hours:.3g} kWh"
    return f"{_prefixed(joules)}J"


def _prefixed(value: float) -> str:
    size = 0
    # From there on three digits would be a thousand.
    while value >= 999.5 and size < len(_PREFIXES) - 1:
        value /= 1000
        size += 1
    return f"{value:.3g} {_PREFIXES[size]}"
