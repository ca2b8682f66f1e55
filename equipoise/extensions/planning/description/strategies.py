"""Loads of the strategies of the core, which know no planner; every other strategy describes itself."""

from collections.abc import Callable, Sequence
from functools import singledispatch

from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.device_loads import WHOLE_STEP, Addition, DeviceLoad, PlannedLoads, StepFacts
from equipoise.extensions.common.planned_devices import PlannedDevice
from equipoise.memory.records import Category
from equipoise.parallel.batches.shares import even_sizes, first_device_sizes, sizes_by_shares
from equipoise.strategies.ddp.strategy import DDPStrategy
from equipoise.strategies.replicated.balanced import BalancedDataParallelStrategy
from equipoise.strategies.replicated.replicated_strategy import ReplicatedStrategy
from equipoise.strategies.single_device import SingleDeviceStrategy
from equipoise.strategies.strategy import Strategy

__all__ = ["device_loads"]

_GRADIENTS: tuple[Category, ...] = ("gradient",)

# Returns the samples of each device for a batch size.
Sizes = Callable[[int], Sequence[int]]


@singledispatch
def device_loads(
    strategy: Strategy, devices: Sequence[PlannedDevice], module: nn.Module, facts: StepFacts
) -> PlannedLoads:
    """Return what each device would hold of a step; the strategy is not connected then.

    Args:
        strategy: The strategy. One of another package has a method `device_loads` with the other arguments.
        devices: The devices, which need not exist.
        module: The user's module, whose parameters may have no memory.
        facts: Bytes of the step on one device.

    Raises:
        ConfigurationError: If the strategy cannot say.
    """
    describe = getattr(strategy, "device_loads", None)
    if describe is None:
        raise ConfigurationError(f"strategy={strategy.name!r} does not say what its devices hold")
    planned: PlannedLoads = describe(devices, module, facts)
    return planned


@device_loads.register
def _of_one_device(
    strategy: SingleDeviceStrategy, devices: Sequence[PlannedDevice], module: nn.Module, facts: StepFacts
) -> PlannedLoads:
    return PlannedLoads(loads=[WHOLE_STEP])


# Replicas in one process.


@device_loads.register
def _of_replicas(
    strategy: ReplicatedStrategy, devices: Sequence[PlannedDevice], module: nn.Module, facts: StepFacts
) -> PlannedLoads:
    if strategy.parallelize == "forward":
        raise ConfigurationError("parallelize='forward' is not predicted; take parallelize='step' for a plan")
    if len(devices) == 1:
        return PlannedLoads(loads=[WHOLE_STEP])
    sizes = _sizes_of(strategy, devices, facts)
    return _replica_loads(len(devices), sizes, facts, copies_gradients=devices[0].kind == "cuda")


def _sizes_of(strategy: ReplicatedStrategy, devices: Sequence[PlannedDevice], facts: StepFacts) -> Sizes:
    """Return the function that returns the samples of each device.

    Shares that are to be measured follow from the memory that the module leaves on each device.
    """
    count = len(devices)
    even: Sizes = lambda batch_size: even_sizes(batch_size, count)  # noqa: E731
    if not isinstance(strategy, BalancedDataParallelStrategy):
        return even
    first = strategy.first_device_batch_size
    shares = strategy.shares
    if first is not None and shares is None:
        return lambda batch_size: first_device_sizes(batch_size, count, first)[0]
    if shares is None:
        replica = facts.parameters + facts.buffers + facts.gradients
        # The first device has the state of the optimisers as well.
        occupied = [replica + facts.optimizer_state] + [replica] * (count - 1)
        rooms = zip(devices, occupied, strict=True)
        shares = [float(max(0, device.usable - nbytes)) for device, nbytes in rooms]
    if len(shares) != count or not any(shares):
        return even
    return lambda batch_size: sizes_by_shares(batch_size, shares)


def _replica_loads(count: int, sizes: Sizes, facts: StepFacts, *, copies_gradients: bool) -> PlannedLoads:
    """Return the loads of replicas in one process, the first of which is the module itself.

    The replicas have neither gradients between two backwards nor a state of the optimiser. The first device receives
    their gradients, those of one replica at a time.

    Args:
        count: The number of devices.
        sizes: Returns the samples of each device.
        facts: The facts of the step.
        copies_gradients: Whether gradients are copied to the first device, as from another GPU.
    """

    def samples_of(index: int) -> Callable[[int], int]:
        return lambda batch_size: sizes(batch_size)[index]

    received = []
    if copies_gradients:
        received.append(Addition(part="copy", nbytes=facts.gradients, phases=("optimizer step",)))
    loads = [DeviceLoad(samples=samples_of(0), additions=received)]
    between_backwards = {"forward": 0, "optimizer step": 0}
    for index in range(1, count):
        load = DeviceLoad(
            samples=samples_of(index),
            factors={"optimizer state": 0, "gradient": between_backwards},
        )
        loads.append(load)
    return PlannedLoads(loads=loads)


# Processes.


@device_loads.register
def _of_processes(
    strategy: DDPStrategy, devices: Sequence[PlannedDevice], module: nn.Module, facts: StepFacts
) -> PlannedLoads:
    if len(devices) == 1:
        return PlannedLoads(loads=[WHOLE_STEP])
    is_native = strategy.engine == "native" or not getattr(module, "automatic_optimization", True)
    return _process_loads(
        len(devices),
        sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad),
        are_views=strategy.gradient_as_bucket_view and not is_native,
        accumulates=facts.accumulates,
        is_native=is_native,
    )


def _process_loads(count: int, trainable: int, *, are_views: bool, accumulates: bool, is_native: bool) -> PlannedLoads:
    """Return the loads of processes that exchange gradients in buckets. Each takes a whole batch.

    Args:
        count: The number of processes.
        trainable: Bytes of the parameters with gradients, which all buckets have together.
        are_views: Whether gradients are views of the buckets all the time.
        accumulates: Whether a window has several batches.
        is_native: Whether gradients become views of the buckets at the end of a window.
    """
    load = DeviceLoad(additions=(Addition(part="bucket", nbytes=trainable),))
    if are_views:
        # Each gradient is copied into its bucket.
        load = DeviceLoad(factors={"gradient": 0}, additions=load.additions, momentary=_GRADIENTS)
    elif is_native:
        # Within a window gradients remain from one batch to the next.
        factors = {"forward": float(accumulates), "optimizer step": 0}
        load = DeviceLoad(factors={"gradient": factors}, additions=load.additions)
    return PlannedLoads(loads=[load] * count, batches=count)
