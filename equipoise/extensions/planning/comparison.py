"""Strategies compared by what their devices would hold of a step: which fit, with which batch, the simplest of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.device_loads import PlannedLoads
from equipoise.extensions.common.planned_devices import PlannedDevice
from equipoise.extensions.planning.description.strategies import device_loads
from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction
from equipoise.extensions.planning.peaks.replay import PredictedPeak
from equipoise.extensions.planning.peaks.search import largest_size
from equipoise.formats import format_bytes
from equipoise.strategies.strategy import Strategy

__all__ = [
    "DevicePeaks",
    "DevicePlan",
    "Recommendation",
    "StrategyPlan",
    "from_simplest",
    "plan_strategies",
    "recommend",
]


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """Memory of one device.

    Attributes:
        name: The device.
        usable: Bytes that tensors can have on it.
        occupied: Bytes that other processes hold.
        samples: Its samples of a batch.
        peak: The predicted peak.
    """

    name: str
    usable: int
    occupied: int
    samples: int
    peak: PredictedPeak

    @property
    def room(self) -> int:
        """Bytes that remain at the peak; negative if it does not fit."""
        return self.usable - self.peak.nbytes


class DevicePeaks:
    """Peaks of the devices of a strategy with any batch of the loader, by its number of samples.

    Args:
        prediction: The prediction for one device.
        devices: The devices.
        planned: Their loads.

    """

    def __init__(self, prediction: MemoryPrediction, devices: Sequence[PlannedDevice], planned: PlannedLoads) -> None:
        self._prediction = prediction
        # The strategy may use fewer devices than there are.
        self._pairs = list(zip(devices, planned.loads, strict=False))

    def at(self, batch_size: int, *, traces: bool = True) -> list[DevicePlan]:
        """Return the memory of each device.

        Args:
            batch_size: Samples of a batch.
            traces: Whether the step is traced for it. Default: True; False returns estimates from what was traced.
        """
        peak = self._prediction.peak if traces else self._prediction.estimated_peak
        return [
            DevicePlan(
                name=device.name,
                usable=device.usable,
                occupied=device.occupied,
                samples=load.samples(batch_size),
                peak=peak(batch_size, load, device.rounding),
            )
            for device, load in self._pairs
        ]

    def fullest(self, batch_size: int, *, traces: bool = True) -> DevicePlan:
        """Return the memory of the device with the least room; see `at`."""
        return min(self.at(batch_size, traces=traces), key=lambda device: device.room)

    def largest_batch(self) -> int:
        """Return the largest batch of the loader with which every device fits; 0 if there is none."""
        return largest_size(
            lambda size: self.fullest(size).room >= 0,
            lambda size: self.fullest(size, traces=False).room >= 0,
            self._prediction.batch_size,
        )


@dataclass(frozen=True, kw_only=True)
class StrategyPlan:
    """Memory of a step under one strategy.

    Attributes:
        strategy: Name of the strategy.
        devices: The devices that it uses, in order; empty if there is no prediction.
        batches: Batches of the loader that a step takes, such as one for each process.
        note: The basis of the figures, if they are estimates.
        reason: The reason why there is no prediction; None if there is one.
        peaks: The peaks with other batches; None if there is no prediction.
        find_largest: Returns the largest batch; see `largest_batch`. Default: there is none.
    """

    strategy: str
    devices: Sequence[DevicePlan] = ()
    batches: int = 1
    note: str = ""
    reason: str | None = None
    peaks: DevicePeaks | None = field(default=None, repr=False)
    find_largest: Callable[[], int] = field(default=int, repr=False)

    @property
    def fits(self) -> bool:
        """True if every device has room for its part of the batch."""
        return bool(self.devices) and all(device.room >= 0 for device in self.devices)

    @cached_property
    def largest_batch(self) -> int:
        """The largest batch of the loader with which every device fits; 0 if there is none. More sizes are traced."""
        return self.find_largest()

    @property
    def fullest(self) -> DevicePlan:
        """The device with the least room."""
        return min(self.devices, key=lambda device: device.room)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The strategy to take.

    Attributes:
        strategy: Its name; None if none fits.
        reason: One sentence.
        overrides: Overrides for the command line.
    """

    strategy: str | None
    reason: str
    overrides: Sequence[str] = ()


def plan_strategies(
    prediction: MemoryPrediction,
    module: nn.Module,
    strategies: Iterable[Strategy],
    devices: Sequence[PlannedDevice],
    batch_size: int | None = None,
) -> list[StrategyPlan]:
    """Return what every strategy would need on the devices.

    Args:
        prediction: The prediction for one device.
        module: The user's module, whose parameters may have no memory.
        strategies: The strategies.
        devices: The devices.
        batch_size: Samples of a batch of the loader. Default: those of the predicted step.
    """
    if batch_size is None:
        batch_size = prediction.batch_size
    return [_plan(prediction, module, strategy, devices, batch_size) for strategy in strategies]


def _plan(
    prediction: MemoryPrediction,
    module: nn.Module,
    strategy: Strategy,
    devices: Sequence[PlannedDevice],
    batch_size: int,
) -> StrategyPlan:
    # 1. What the devices hold, and their peaks with the batch. A strategy may refuse both.
    try:
        planned = device_loads(strategy, devices, module, prediction.facts)
        if planned.part is not None:
            if prediction.of_part is None:
                raise ConfigurationError("parts of samples are predicted from a trace, which this step does not have")
            prediction = prediction.of_part(planned.part)
        peaks = DevicePeaks(prediction, devices, planned)
        plans = peaks.at(batch_size)
    except ConfigurationError as error:
        return StrategyPlan(strategy=strategy.name, reason=str(error).rstrip("."))

    # 2. The largest batch is searched when it is asked for.
    return StrategyPlan(
        strategy=strategy.name,
        devices=plans,
        batches=planned.batches,
        note=planned.note,
        peaks=peaks,
        find_largest=peaks.largest_batch,
    )


# Strategies that use several devices, the simplest first; of equal devices, and of unequal ones.
_FOR_EQUAL = ("ddp", "dp", "balanced", "fsdp", "pipeline", "single_device")
_FOR_UNEQUAL = ("balanced", "ddp", "dp", "fsdp", "pipeline", "single_device")


def recommend(
    plans: Sequence[StrategyPlan],
    devices: Sequence[PlannedDevice],
    batch_size: int,
    accumulated: Sequence[StrategyPlan] = (),
    accumulate_grad_batches: int = 1,
    budget: int | None = None,
) -> Recommendation:
    """Return the simplest strategy that fits, with its reason.

    Args:
        plans: The strategies.
        devices: The devices.
        batch_size: Samples of a batch.
        accumulated: The strategies with accumulated batches, if `plans` are without: gradients live longer then.
            Default: `plans` are with them, or nothing is accumulated where no strategy fits.
        accumulate_grad_batches: Batches of an accumulation window in `plans`. Default: 1.
        budget: Tokens of a batch, if the largest batches of the strategies are numbers of tokens. Default: None, they
            are numbers of samples.
    """
    batch = f"a batch of {batch_size}"
    if budget is not None:
        batch_size = budget
        batch = f"a batch of {budget} tokens"
    # 1. The first one that fits.
    for plan in from_simplest(plans, devices):
        if plan.fits:
            room = format_bytes(plan.fullest.room)
            reason = (
                f"it is the simplest strategy on {_count(len(devices))} with which {batch} fits; its"
                f" fullest device has room for {room} more"
            )
            return Recommendation(strategy=plan.strategy, reason=reason, overrides=[f"strategy={plan.strategy}"])

    # 2. Smaller batches, accumulated.
    ordered = from_simplest(accumulated or plans, devices)
    largest = max(ordered, key=lambda plan: plan.largest_batch * plan.batches, default=None)
    # A step with one sample may be too large already.
    if largest is None or not largest.largest_batch:
        return Recommendation(strategy=None, reason="no strategy fits, not even with one sample")
    # Rounded up, so that the step is no smaller.
    batches = -(-batch_size // largest.largest_batch)
    smaller = -(-batch_size // batches)
    key = "batch_size"
    step = "the same step"
    if budget is not None:
        # A budget that fits has room for the longest sample. A smaller one may have none.
        smaller = largest.largest_batch
        key = "max_tokens"
        step = "a step of as many or more"
    reason = (
        f"no strategy fits with {batch}; {batches} batches of {smaller}, whose gradients are accumulated, make {step}"
    )
    overrides = [
        f"strategy={largest.strategy}",
        f"data.{key}={smaller}",
        f"trainer.accumulate_grad_batches={batches * accumulate_grad_batches}",
    ]
    return Recommendation(strategy=largest.strategy, reason=reason, overrides=overrides)


def from_simplest(plans: Sequence[StrategyPlan], devices: Sequence[PlannedDevice]) -> list[StrategyPlan]:
    """Return the strategies that a user would take, the simplest first.

    Unequal devices are best used in unequal parts, so strategies that can do so come first there.
    """
    order: Sequence[str] = ["single_device"]
    if len(devices) > 1:
        order = _FOR_EQUAL
        memories = {device.usable for device in devices}
        if len(memories) > 1:
            order = _FOR_UNEQUAL
    by_name = {plan.strategy: plan for plan in plans}
    return [by_name[name] for name in order if name in by_name]


def _count(devices: int) -> str:
    if devices == 1:
        return "one device"
    return f"{devices} devices"
