"""The cut of a network into stages: measured, by names, or pinned; and the table that shows it."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.errors import ConfigurationError
from equipoise.memory.devices import format_bytes, list_devices
from equipoise.pipeline.graph.stages import may_cut, modules_of, names_of, owners, taking_inputs, with_parents
from equipoise.pipeline.graph.tracing import Traced
from equipoise.pipeline.planning.loss_profile import LossProfile
from equipoise.pipeline.planning.partition import DoesNotFit, choose_cuts, describe_stages
from equipoise.pipeline.planning.profile import add_rest, merge_blocks, profile_calls
from equipoise.pipeline.planning.stage_costs import Block, Stage, StageDevice
from equipoise.pipeline.schedule.schedule import Schedule, splits
from equipoise.pipeline.schedule.timeline import simulate

__all__ = ["Cut", "CutOptions", "PinnedCut", "cut_as_pinned", "cut_automatically", "cut_by_names", "table_of"]

_RESERVE = 0.9  # of a device's memory may be planned with


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """What the user wishes.

    Attributes:
        devices: One for each stage: with several on each of p devices, stage s has that of stage s modulo p.
        schedule: See `parallel.schedule`.
        micro_batches: How many there will be.
        stages_per_device: How many stages each device has. Default: 1.
        speeds: For each device how fast it is beside the others; None: all alike.
        dim: The dimension of a batch's tensors that holds its samples.
        measured_on: Where calls are measured. Default: the first device.
    """

    devices: Sequence[torch.device]
    schedule: Schedule
    micro_batches: int
    stages_per_device: int = 1
    speeds: Sequence[float] | None = None
    dim: int = 0
    measured_on: torch.device | None = None

    @property
    def own_devices(self) -> Sequence[torch.device]:
        """The devices, each with all of its stages."""
        return self.devices[: len(self.devices) // self.stages_per_device]

    def stage_devices(self) -> list[StageDevice]:
        """What each stage has to do with. Devices that are the same one share its memory, as all on a CPU do."""
        devices = self.own_devices
        infos = {info.device: info for info in list_devices(only={str(device) for device in devices})}
        speeds = self.speeds or [1.0] * len(devices)
        made = []
        for device, speed in zip(devices, speeds, strict=True):
            info, shared = infos.get(str(device)), devices.count(device)
            free = None if info is None else info.memory_free
            limit = None if free is None else int(_RESERVE * free / shared)
            made.append(StageDevice(slowness=max(speeds) / speed, memory=limit))
        return made * self.stages_per_device


@dataclass(frozen=True, kw_only=True)
class PinnedCut:
    """A cut as a run leaves it to the next.

    Attributes:
        names: The names of what the stages but the first begin with.
        calls: The same as the traced forward has them, which tells repeated calls of a layer apart.
    """

    names: list[str]
    calls: list[str]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A network cut into stages.

    Attributes:
        ends: For each stage the index of the call after its last.
        first_blocks: For each stage the name of what it begins with.
        first_calls: The same as the traced forward has it.
        stages: What is predicted of each; empty for a cut that was not measured.
        peaks: For each device the predicted bytes at the peak, all of its stages together; empty likewise.
        idle: The predicted share of time in which stages wait; None if nothing was measured.
        samples: The samples of the micro-batch that was measured; None if nothing was, or nobody can tell.
        beside: The seconds of the last stage in which a step computes what follows the network's call, the loss for
            instance; None where that was not measured.
    """

    ends: list[int]
    first_blocks: list[str]
    first_calls: list[str]
    stages: list[Stage]
    idle: float | None
    samples: int | None = None
    peaks: Sequence[int] = ()
    beside: float | None = None

    @property
    def pinned(self) -> PinnedCut:
        """What a later run needs of it."""
        return PinnedCut(names=self.first_blocks[1:], calls=self.first_calls[1:])


def cut_automatically(
    traced: Traced,
    module: nn.Module,
    tensors: Sequence[Tensor],
    options: CutOptions,
    prefix: str,
    rest: LossProfile | None = None,
) -> Cut:
    """Measures the calls of a forward, and chooses.

    Args:
        traced: The forward.
        module: The user's module.
        tensors: The tensors of a call with one micro-batch.
        options: What the user wishes.
        prefix: The network's name in the user's module; empty if it is that itself.
        rest: Measures what a step computes after the network's call. Default: that is not counted.

    Raises:
        ConfigurationError: If there are more stages than places to cut, or nothing fits.
    """
    device, split = options.measured_on or options.devices[0], splits(options.schedule)
    measure = None if rest is None else rest.measure
    calls = profile_calls(traced, module, tensors, device, split=split, rest=measure)
    blocks, ends_of_blocks = merge_blocks(calls, len(options.devices))
    if (beside := None if rest is None else rest.block) is not None:
        blocks = add_rest(blocks, _as_measured(beside, options))
    devices = options.stage_devices()
    plan: dict[str, Any] = {
        "schedule": options.schedule,
        "micro_batches": options.micro_batches,
        "stages_per_device": options.stages_per_device,
    }
    try:
        chosen = choose_cuts(blocks, devices, **plan)
    except ValueError:
        raise ConfigurationError(_too_few(len(blocks), options, traced, prefix)) from None
    except DoesNotFit as error:
        stages, peaks = describe_stages(blocks, devices, error.best, **plan)
        raise ConfigurationError(_does_not_fit(options, devices, peaks)) from None
    stages, peaks = describe_stages(blocks, devices, chosen, **plan)
    ends = [ends_of_blocks[end - 1] for end in chosen]
    sizes = {tensor.size(options.dim) for tensor in tensors if tensor.ndim > options.dim}
    samples = sizes.pop() if len(sizes) == 1 else None
    made = _cut(traced, ends, prefix, stages, _idle(stages, options))
    return replace(made, samples=samples, peaks=peaks, beside=_seconds(beside))


def _too_few(blocks: int, options: CutOptions, traced: Traced, prefix: str) -> str:
    """Say that there are more stages than blocks, and what may be done about that."""
    told = (
        f"The network has {blocks} block{'s' * (blocks != 1)} to cut between, which is not enough for"
        f" {len(options.devices)} stages."
    )
    whole = _largest_whole(traced, prefix)
    if blocks > 1:
        told += f" Give fewer devices{' or stages_per_device' * (options.stages_per_device > 1)}."
        return f"{told} Or: {whole}" if whole else told
    return f"{told} {whole or 'Write it as several submodules'}, or choose another strategy, such as 'dp' or 'ddp'."


def _largest_whole(traced: Traced, prefix: str) -> str:
    """Say of the largest submodule that stayed whole why it did, and how it could be cut; empty where none did."""
    outermost = {
        name: reason
        for name, reason in traced.opaque.items()
        if not any(outer in traced.opaque for outer in with_parents(name)[:-1])
    }
    parts = {name: traced.root.get_submodule(f"network.{name}") for name in outermost}
    sizes = {name: sum(parameter.numel() for parameter in part.parameters()) for name, part in parts.items()}
    if not sizes:
        return ""
    name = max(sizes, key=lambda name: sizes[name])
    whole = sum(parameter.numel() for parameter in traced.root.parameters())
    share = f"{sizes[name] / whole:.0%}" if whole else "none"
    return (
        f"{_shown(name, True, prefix)!r} ({type(parts[name]).__name__}), which has {share} of the parameters, is one"
        f" block, since it cannot be followed: {outermost[name]}. Let a submodule of its own, without the large layers,"
        " do what that line does; or call the network without the argument for which it asks, such as an attention mask"
    )


def _as_measured(rest: Block, options: CutOptions) -> Block:
    """What was measured on the last device as if it had been where the calls were."""
    elsewhere = options.measured_on is None and options.devices[0] != options.devices[-1]
    factor = options.speeds[-1] / options.speeds[0] if options.speeds is not None and elsewhere else 1.0
    return replace(rest, forward=factor * rest.forward, backward=factor * rest.backward)


def _seconds(rest: Block | None) -> float | None:
    return None if rest is None else rest.forward + rest.backward


def _does_not_fit(options: CutOptions, devices: Sequence[StageDevice], peaks: Sequence[int]) -> str:
    one = options.stages_per_device == 1
    wanted = "; ".join(
        f"{'stage' if one else 'device'} {index} on {name} {format_bytes(peak)} of {format_bytes(device.memory or 0)}"
        for index, (peak, name, device) in enumerate(zip(peaks, options.devices, devices, strict=False))
    )
    return (
        f"No cut of the network {'fits' if one else 'was found that fits'} into memory; the best would need: {wanted}."
        " More micro_batches, a smaller batch, activation checkpointing, a lower precision or more devices would help."
    )


def _cut(traced: Traced, ends: Sequence[int], prefix: str, stages: list[Stage], idle: float | None) -> Cut:
    first, names = [traced.calls[begin] for begin in ends[:-1]], names_of(traced)
    return Cut(
        ends=list(ends),
        first_blocks=["", *(_shown(*names[begin], prefix) for begin in ends[:-1])],
        first_calls=["", *(node.name for node in first)],
        stages=stages,
        idle=idle,
    )


def _shown(name: str, is_module: bool, prefix: str) -> str:
    return f"{prefix}.{name}" if prefix and is_module else name


def cut_as_pinned(traced: Traced, pinned: PinnedCut, prefix: str, stages: int) -> Cut | None:
    """Cuts as an earlier run did.

    Args:
        traced: The forward.
        pinned: The earlier cut.
        prefix: The network's name in the user's module; empty if it is that itself.
        stages: The number of stages.

    Returns:
        The cut; None if this network is not that one, or there are other devices.
    """
    if len(pinned.calls) != stages - 1:
        return None
    allowed, order = may_cut(traced), {node.name: index for index, node in enumerate(traced.calls)}
    ends = [order.get(name, 0) for name in pinned.calls]
    if all(ends) and ends == sorted(set(ends)) and all(allowed[end - 1] for end in ends):
        return _cut(traced, [*ends, len(traced.calls)], prefix, [], None)
    try:
        return cut_by_names(traced, pinned.names, prefix, stages)
    except ConfigurationError:
        return None


def cut_by_names(traced: Traced, names: Sequence[str], prefix: str, stages: int) -> Cut:
    """Cuts before modules.

    Args:
        traced: The forward.
        names: The modules with which the stages but the first begin, by their names in the user's module or in the
            network; or other calls, as the table names them.
        prefix: The network's name in the user's module; empty if it is that itself.
        stages: The number of stages.

    Raises:
        ConfigurationError: If there is none of a name, or it cannot be cut there.
    """
    if len(names) != stages - 1:
        raise ConfigurationError(
            f"{stages} stages need {stages - 1} names to cut before, but there are {len(names)}: {list(names)}."
        )
    allowed, ends, last = may_cut(traced), [], 0
    called = owners(traced)
    for name in names:
        own = name.removeprefix(f"{prefix}.") if prefix else name
        place = next(
            (index for index, node in enumerate(traced.calls) if node.name == name or _is_within(node, own)), None
        )
        if place is None:
            known = sorted({part for used in called for one in used for part in with_parents(one)})
            known = [f"{prefix}.{one}" if prefix and name.startswith(f"{prefix}.") else one for one in known]
            near = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else f" There are {', '.join(known[:20])}."
            raise ConfigurationError(f"cut_before names {name!r}, which the network does not call.{hint}")
        if place <= last or not allowed[place - 1]:
            why = "what it begins with is changed in place" if place > last else "it comes before the cut named earlier"
            if place <= taking_inputs(traced):
                why = "that is where it begins"
            raise ConfigurationError(f"The network cannot be cut before {name!r}: {why}. Name another module.")
        ends.append(place)
        last = place
    return _cut(traced, [*ends, len(traced.calls)], prefix, [], None)


def _is_within(node: fx.Node, name: str) -> bool:
    """Whether a call is one of a module, or of what is in it."""
    return any(f"{path}.".startswith(f"{name}.") for path in modules_of(node))


def _idle(stages: Sequence[Stage], options: CutOptions) -> float:
    forward, backward = [stage.forward for stage in stages], [stage.backward for stage in stages]
    return simulate(options.schedule, forward, backward, options.micro_batches, options.stages_per_device).idle


def table_of(cut: Cut, options: CutOptions, sizes: Sequence[int]) -> str:
    """The cut in words, a line for each stage.

    Args:
        cut: The cut.
        options: The devices and the schedule.
        sizes: For each stage the bytes of its parameters.
    """
    header = f"{'stage':>5}  {'device':<8}  {'begins with':<24}  {'parameters':>10}"
    if cut.stages:
        header += f"  {'time':>9}  {'memory':>10}"
    lines = [header]
    for index, (device, name, size) in enumerate(zip(options.devices, cut.first_blocks, sizes, strict=True)):
        line = f"{index:>5}  {device!s:<8}  {name or '(input)':<24}  {format_bytes(size):>10}"
        if cut.stages:
            stage = cut.stages[index]
            line += f"  {(stage.forward + stage.backward) * 1000:>6.2f} ms  {format_bytes(stage.memory):>10}"
        lines.append(line)
    if options.stages_per_device > 1 and cut.peaks:
        lines.append(f"Memory of all stages of a device at its peak: {_peaks(cut, options)}.")
    if cut.idle is not None:
        of = "" if cut.samples is None else f" of {cut.samples} sample{'s' * (cut.samples != 1)}"
        lines.append(
            f"Predicted for a micro-batch{of}; with {options.micro_batches} of them under {options.schedule!r}"
            f" {'stages' if options.stages_per_device == 1 else 'devices'} idle {cut.idle:.0%} of the time."
        )
    if cut.beside is not None:
        lines.append(
            f"In the time of the last stage are {cut.beside * 1000:.2f} ms for what the step computes after the call."
        )
    return "\n".join(lines)


def _peaks(cut: Cut, options: CutOptions) -> str:
    return ", ".join(
        f"{device} {format_bytes(peak)}" for device, peak in zip(options.own_devices, cut.peaks, strict=True)
    )
