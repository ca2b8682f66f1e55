"""The cut of a network into stages: its options, cuts by names or as in an earlier run, and the table of stages."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from equipoise.errors import ConfigurationError
from equipoise.extensions.pipeline.graph.call_names import modules_of, names_of, owner_of, with_parents
from equipoise.extensions.pipeline.graph.stages import may_cut, taking_inputs
from equipoise.extensions.pipeline.graph.traced import Traced
from equipoise.extensions.pipeline.planning.stage_costs import Stage, StageDevice
from equipoise.extensions.pipeline.schedule.schedule import Schedule
from equipoise.formats import format_bytes
from equipoise.memory.devices import list_devices

__all__ = ["Cut", "CutOptions", "PinnedCut", "build_cut", "cut_as_pinned", "cut_by_names", "public_name", "table_of"]

# Share of a device's free memory that a cut may use.
_RESERVE = 0.9


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """Options of a cut, from the strategy's arguments.

    Attributes:
        devices: One for each stage: with several on each of p devices, stage s has that of stage s modulo p.
        schedule: The schedule; see `pipeline.schedule`.
        micro_batches: Number of micro-batches.
        stages_per_device: Number of stages on each device. Default: 1.
        speeds: For each device its speed relative to the others; None: all are equally fast.
        measured_on: Device on which calls are measured. Default: the first device.
        links: Seconds for each byte that passes from a device to the next, and from the last one to the first. Default:
            values take no time.
    """

    devices: Sequence[torch.device]
    schedule: Schedule
    micro_batches: int
    stages_per_device: int = 1
    speeds: Sequence[float] | None = None
    measured_on: torch.device | None = None
    links: Sequence[float] = ()

    @property
    def own_devices(self) -> Sequence[torch.device]:
        """The devices without repetition: one entry for each, with all of its stages."""
        return self.devices[: len(self.devices) // self.stages_per_device]

    def stage_devices(self) -> list[StageDevice]:
        """Return speed and memory for each stage. Equal devices share their memory, as several on a CPU do."""
        devices = self.own_devices
        infos = {info.device: info for info in list_devices(only={str(device) for device in devices})}
        speeds = self.speeds or [1.0] * len(devices)
        links = list(self.links) or [0.0] * len(devices)
        stage_devices = []
        for device, speed, link in zip(devices, speeds, links, strict=True):
            info = infos.get(str(device))
            memory = None
            if info is not None and info.memory_free is not None:
                # An entry that repeats a device gets its part of the memory.
                memory = int(_RESERVE * info.memory_free / devices.count(device))
            stage_devices.append(StageDevice(slowness=max(speeds) / speed, memory=memory, link=link))
        return stage_devices * self.stages_per_device


@dataclass(frozen=True, kw_only=True)
class PinnedCut:
    """A cut that one run leaves to the next.

    Attributes:
        names: For each stage but the first the name of its first module.
        calls: The same by the names of traced calls, which differ for repeated calls of a layer.
    """

    names: list[str]
    calls: list[str]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A network cut into stages.

    Attributes:
        ends: For each stage the index of the call after its last.
        first_blocks: For each stage the name of its first module.
        first_calls: For each stage the name of its first call in the traced forward.
        stages: Predicted costs of each stage; empty for a cut that was not measured.
        idle: Predicted share of time in which stages wait; None if nothing was measured.
        samples: Samples of the micro-batch that was measured; None if nothing was, or if its tensors differ in it.
        peaks: For each device the predicted bytes at the peak, all of its stages together; empty if not measured.
        note: Sentence that says how the network is cut; empty for recorded calls.
    """

    ends: list[int]
    first_blocks: list[str]
    first_calls: list[str]
    stages: list[Stage]
    idle: float | None
    samples: int | None = None
    peaks: Sequence[int] = ()
    note: str = ""

    @property
    def pinned(self) -> PinnedCut:
        """The part of the cut that a later run needs."""
        return PinnedCut(names=self.first_blocks[1:], calls=self.first_calls[1:])


def build_cut(traced: Traced, ends: Sequence[int], prefix: str) -> Cut:
    """Return a cut without predictions.

    Args:
        traced: The forward.
        ends: For each stage the index of the call after its last.
        prefix: The network's name in the user's module; empty if it is that module.
    """
    names = names_of(traced)
    first_blocks = [""]
    first_calls = [""]
    for begin in ends[:-1]:
        name, is_module = names[begin]
        first_blocks.append(public_name(name, is_module, prefix))
        first_calls.append(traced.calls[begin].name)
    return Cut(
        ends=list(ends),
        first_blocks=first_blocks,
        first_calls=first_calls,
        stages=[],
        idle=None,
    )


def public_name(name: str, is_module: bool, prefix: str) -> str:
    """Return the name of a module of the network in the user's module, or of another call.

    Args:
        name: The name in the network.
        is_module: False for a call that belongs to no module; it has no prefix.
        prefix: The network's name in the user's module; empty if it is that module.
    """
    if prefix and is_module:
        return f"{prefix}.{name}"
    return name


# Cuts that are not measured.


def cut_as_pinned(
    traced: Traced,
    pinned: PinnedCut,
    prefix: str,
    stages: int,
) -> Cut | None:
    """Cut as an earlier run did.

    Args:
        traced: The forward.
        pinned: The earlier cut.
        prefix: The network's name in the user's module; empty if it is that module.
        stages: Number of stages.

    Returns:
        The cut; None if this is another network, or the number of devices differs.
    """
    if len(pinned.calls) != stages - 1:
        return None
    order = {node.name: index for index, node in enumerate(traced.calls)}
    # An unknown call gets 0, with which no stage but the first can begin.
    ends = [order.get(name, 0) for name in pinned.calls]
    if _are_valid_ends(traced, ends):
        # Names of calls are exact, also where the network calls a layer twice.
        ends.append(len(traced.calls))
        return build_cut(traced, ends, prefix)
    # The calls have changed. The modules may still exist.
    try:
        return cut_by_names(traced, pinned.names, prefix, stages)
    except ConfigurationError:
        return None


def _are_valid_ends(traced: Traced, ends: Sequence[int]) -> bool:
    """Return True if stages may end there, in this order. An end of 0 is an unknown call."""
    is_increasing = list(ends) == sorted(set(ends))
    if not all(ends) or not is_increasing:
        return False
    allowed = may_cut(traced)
    return all(allowed[end - 1] for end in ends)


def cut_by_names(
    traced: Traced,
    names: Sequence[str],
    prefix: str,
    stages: int,
) -> Cut:
    """Cut before modules.

    Args:
        traced: The forward.
        names: For each stage but the first the module with which it begins, by its name in the user's module or in the
            network; or another call, as the table names it.
        prefix: The network's name in the user's module; empty if it is that module.
        stages: Number of stages.

    Raises:
        ConfigurationError: If a name is unknown, or the network cannot be cut there.
    """
    cuts = stages - 1
    if len(names) != cuts:
        raise ConfigurationError(
            f"{stages} stages need {cuts} names to cut before, but there are {len(names)}: {list(names)}."
        )
    allowed = may_cut(traced)
    ends: list[int] = []
    last_end = 0
    for name in names:
        # 1. Find the first call of the stage.
        end = _index_of_call(traced, name, prefix)
        if end is None:
            hint = _hint(traced, name, prefix)
            raise ConfigurationError(f"cut_before names {name!r}, which the network does not call.{hint}")

        # 2. Check that a stage may begin with it.
        is_behind_last = end > last_end
        if not is_behind_last or not allowed[end - 1]:
            reason = _reason_against(traced, end, is_behind_last)
            raise ConfigurationError(f"The network cannot be cut before {name!r}: {reason}. Name another module.")
        ends.append(end)
        last_end = end
    ends.append(len(traced.calls))
    return build_cut(traced, ends, prefix)


def _reason_against(traced: Traced, end: int, is_behind_last: bool) -> str:
    if end <= taking_inputs(traced):
        return "that is where it begins"
    if is_behind_last:
        return "what it begins with is changed in place, or is taken out of a container there"
    return "it comes before the cut named earlier"


def _index_of_call(traced: Traced, name: str, prefix: str) -> int | None:
    """Return the index of the first call of this name, or within the module of this name; None if there is none."""
    # The dots prevent that "layer1" matches "layer10".
    beginning = f"{_name_in_network(name, prefix)}."
    for index, node in enumerate(traced.calls):
        is_within = any(f"{path}.".startswith(beginning) for path in modules_of(node))
        if is_within or node.name == name:
            return index
    return None


def _name_in_network(name: str, prefix: str) -> str:
    return name.removeprefix(f"{prefix}.") if prefix else name


def _hint(traced: Traced, name: str, prefix: str) -> str:
    """Return the module that contains an unknown name and stays whole, the closest name, or the first names."""
    for parent in with_parents(_name_in_network(name, prefix))[:-1]:
        if parent in traced.opaque:
            whole = public_name(parent, True, prefix)
            return f" {whole!r} stays whole, since it cannot be followed: {traced.opaque[parent]}."
    module_names: set[str] = set()
    for node in traced.calls:
        name_of_call = owner_of(node)
        if name_of_call is not None:
            module_names.update(with_parents(name_of_call))
    candidates = sorted(module_names)
    if prefix and name.startswith(f"{prefix}."):
        # The user writes names of the module, not of the network.
        candidates = [f"{prefix}.{candidate}" for candidate in candidates]
    closest = difflib.get_close_matches(name, candidates, 1)
    if closest:
        return f" Did you mean {closest[0]!r}?"
    first_names = ", ".join(candidates[:20])
    return f" There are {first_names}."


# The table.

# Layout of the columns; those of predictions come last.
_COLUMNS = ("{:>5}", "{:<8}", "{:<24}", "{:>10}", "{:>9}", "{:>10}")


def table_of(cut: Cut, options: CutOptions, sizes: Sequence[int]) -> str:
    """Return the cut as a table with a line for each stage.

    Args:
        cut: The cut.
        options: The devices and the schedule.
        sizes: For each stage the bytes of its parameters.
    """
    # 1. The columns that every cut has, and those of a measured one.
    rows = [["stage", "device", "begins with", "parameters"]]
    columns = zip(options.devices, cut.first_blocks, sizes, strict=True)
    for index, (device, name, size) in enumerate(columns):
        rows.append([str(index), str(device), name or "(input)", format_bytes(size)])
    if cut.stages:
        rows[0] += ["time", "memory"]
        for row, stage in zip(rows[1:], cut.stages, strict=True):
            row += [f"{stage.seconds * 1000:.2f} ms", format_bytes(stage.memory)]
    lines = [_line(row) for row in rows]

    # 2. Predictions for all stages together.
    if options.stages_per_device > 1 and cut.peaks:
        peaks = []
        for device, peak in zip(options.own_devices, cut.peaks, strict=True):
            peaks.append(f"{device} {format_bytes(peak)}")
        lines.append(f"Memory of all stages of a device at its peak: {', '.join(peaks)}.")
    if cut.idle is not None:
        lines.append(_prediction(cut, options))
    if cut.note:
        lines.append(cut.note)
    return "\n".join(lines)


def _line(texts: Sequence[str]) -> str:
    return "  ".join(column.format(text) for column, text in zip(_COLUMNS, texts, strict=False))


def _prediction(cut: Cut, options: CutOptions) -> str:
    """Return the line with the predicted bubble."""
    of_samples = ""
    if cut.samples == 1:
        of_samples = " of 1 sample"
    elif cut.samples is not None:
        of_samples = f" of {cut.samples} samples"
    # A device with several stages is idle only if all of them wait.
    waiting = "stages"
    if options.stages_per_device > 1:
        waiting = "devices"
    return (
        f"Predicted for a micro-batch{of_samples}; with {options.micro_batches} of them under {options.schedule!r}"
        f" {waiting} idle {cut.idle:.0%} of the time."
    )
