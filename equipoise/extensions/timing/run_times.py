"""RunTimes: the time of a run, by parts of which none contains another."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from equipoise.extensions.timing.parts import (
    BACKWARD,
    BETWEEN_STEPS,
    COMPUTATION,
    EXCHANGE,
    FORWARD,
    REST,
    Cell,
)
from equipoise.formats import format_duration

__all__ = ["RunTimes", "without_inner_parts"]

_LEAST_SHOWN = 0.01
# Parts in which processes wait for each other.
_SHARED_PARTS = (BACKWARD, COMPUTATION, EXCHANGE)


@dataclass
class RunTimes:
    """The time of a run by parts, in one process, after its first steps.

    Attributes:
        seconds: Duration of the run.
        steps: Number of steps, of which each has a batch.
        first_seconds: Duration of the first three steps, with compilation.
        parts: Seconds of each part, which add up to `seconds`. A callback's part is "callback NAME".
        ranks: For each process the seconds that it did not spend on the backward and the exchange, in which processes
            wait for each other. Empty in one process.

    Example:
        >>> RunTimes(10.0, 100, parts={"forward": 4.0, "backward": 6.0}).shares()
        {'backward': 0.6, 'forward': 0.4}
    """

    seconds: float
    steps: int
    first_seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    ranks: list[float] = field(default_factory=list)

    def shares(self) -> dict[str, float]:
        """Return the share of each part, the largest first."""
        if self.seconds <= 0:
            return {}
        ordered = sorted(self.parts.items(), key=lambda part: -part[1])
        return {name: seconds / self.seconds for name, seconds in ordered}

    def step_seconds(self) -> float:
        """Return the mean duration of a step, without validations and checkpoints."""
        between = sum(self.parts.get(name, 0.0) for name in BETWEEN_STEPS)
        return (self.seconds - between) / max(1, self.steps)

    def own_seconds(self) -> float:
        """Return the seconds in which this process waits for no other."""
        return self.seconds - sum(self.parts.get(name, 0.0) for name in _SHARED_PARTS)

    def waiting_share(self) -> float:
        """Return the share of the run in which the others wait for the slowest process, as far as it is known."""
        if len(self.ranks) < 2 or self.seconds <= 0:
            return 0.0
        longest = max(self.ranks)
        sum_of_others = sum(self.ranks) - longest
        mean_of_others = sum_of_others / (len(self.ranks) - 1)
        return (longest - mean_of_others) / self.seconds

    def rows(self) -> dict[str, str]:
        """Return the lines of a summary."""
        shares = []
        for name, share in self.shares().items():
            if share >= _LEAST_SHOWN:
                shares.append(f"{name} {share:.0%}")
        rows = {
            "time of a step": format_duration(self.step_seconds()),
            "first steps": format_duration(self.first_seconds),
            "time by part": ", ".join(shares),
        }
        if self.ranks:
            slowest = self.ranks.index(max(self.ranks))
            rows["slowest process"] = f"rank {slowest}, the others wait {self.waiting_share():.0%} of the time for it"
        return rows


def without_inner_parts(
    cells: Mapping[Cell, float], seconds: float, device: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the seconds of each part without those of the parts within it.

    Args:
        cells: Seconds of the clock's cells.
        seconds: Duration of the run.
        device: Seconds of a CUDA device by parts, in some steps. Default: None, the host's times are right.
    """
    # 1. The seconds of each part, without those of the parts within it.
    result: dict[str, float] = {}
    for cell, duration in cells.items():
        name = f"{cell.part} {cell.name}".rstrip()
        result[name] = result.get(name, 0.0) + duration
    for cell, duration in cells.items():
        if cell.within in result:
            result[cell.within] -= duration
    # 2. The rest.
    result[REST] = max(0.0, seconds - sum(result.values()))
    if device is not None and sum(device.values()) > 0:
        result = _by_device(result, seconds, device)
    # 3. Forward and backward without a border.
    forward = result.get(FORWARD, 0.0)
    backward = result.get(BACKWARD, 0.0)
    computation = forward + backward
    if min(forward, backward) < computation / 100:
        result[COMPUTATION] = computation
        result.pop(FORWARD, None)
        result.pop(BACKWARD, None)
    return result


def _by_device(host: Mapping[str, float], seconds: float, device: Mapping[str, float]) -> dict[str, float]:
    """Return the parts with a device's shares of the steps in place of the host's."""
    result = {name: host[name] for name in BETWEEN_STEPS if name in host}
    in_steps = seconds - sum(result.values())
    # The rest of the device's time is that of the host's other parts, for which the device waits.
    counted = {*result, *device, EXCHANGE}
    others = {name: host[name] for name in host if name not in counted}
    others[REST] = host[REST]
    scale = in_steps / sum(device.values())
    for name, duration in device.items():
        result[name] = duration * scale
    delay = result.pop(REST)
    total = sum(others.values())
    if not total:
        # All of them are 0.
        total = 1.0
    for name, duration in others.items():
        result[name] = delay * duration / total
    return result
