"""Measure the calls of a network, and choose the cut into stages."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.pipeline.graph.call_names import with_parents
from equipoise.extensions.pipeline.graph.traced import Traced
from equipoise.extensions.pipeline.planning.block_merging import merge_blocks
from equipoise.extensions.pipeline.planning.cut import Cut, CutOptions, build_cut, public_name
from equipoise.extensions.pipeline.planning.partition import DoesNotFit, NoCut, choose_cuts
from equipoise.extensions.pipeline.planning.profile import profile_calls
from equipoise.extensions.pipeline.planning.stage_costs import Block, Costs, Stage, StageDevice
from equipoise.extensions.pipeline.schedule.schedule import splits
from equipoise.extensions.pipeline.schedule.simulation import simulate
from equipoise.formats import format_bytes

__all__ = ["TooFewBlocks", "best_cut", "cut_automatically", "largest_opaque", "narrow_to_micro_batch"]


class TooFewBlocks(ConfigurationError):
    """Raised if a network has fewer blocks than stages."""


def cut_automatically(
    traced: Traced,
    module: nn.Module,
    tensors: Sequence[Tensor],
    options: CutOptions,
    prefix: str,
) -> Cut:
    """Measure the calls of a forward, and return the best cut.

    Args:
        traced: The forward.
        module: The user's module.
        tensors: Tensors of a call with one micro-batch.
        options: The user's options.
        prefix: The network's name in the user's module; empty if it is that module.

    Raises:
        ConfigurationError: If there are more stages than places for a cut, or nothing fits into memory.
    """
    # 1. Measure the calls, and merge them into blocks.
    device = options.measured_on or options.devices[0]
    calls = profile_calls(traced, module, tensors, device, split=splits(options.schedule))
    blocks, ends_of_blocks = merge_blocks(calls, len(options.devices))

    # 2. Choose the last block of each stage.
    def cut_at(ends: Sequence[int]) -> Cut:
        return build_cut(traced, [ends_of_blocks[end - 1] for end in ends], prefix)

    try:
        return best_cut(blocks, options, tensors, cut_at)
    except NoCut:
        raise TooFewBlocks(_too_few_blocks(len(blocks), options, traced, prefix)) from None


def best_cut(
    blocks: Sequence[Block],
    options: CutOptions,
    tensors: Sequence[Tensor],
    cut_at: Callable[[Sequence[int]], Cut],
) -> Cut:
    """Return the best cut between measured blocks, with what it costs.

    Args:
        blocks: The blocks.
        options: The user's options.
        tensors: Tensors of the call that was measured.
        cut_at: Returns a cut without predictions, from the index of the block after the last of each stage.

    Raises:
        NoCut: If there are more stages than places for a cut.
        ConfigurationError: If nothing fits into memory.
    """
    # 1. Choose the last block of each stage.
    devices = options.stage_devices()
    costs = Costs(blocks, devices, options.schedule, options.micro_batches, options.stages_per_device)
    try:
        ends = choose_cuts(costs)
    except DoesNotFit as error:
        message = _does_not_fit(options, devices, costs.peaks(costs.stages(error.best)))
        raise ConfigurationError(message) from None

    # 2. Describe the cut.
    stages = costs.stages(ends)
    return replace(
        cut_at(ends),
        stages=stages,
        idle=_idle(stages, options),
        samples=_samples_of(tensors),
        peaks=costs.peaks(stages),
    )


def _samples_of(tensors: Sequence[Tensor]) -> int | None:
    """Return the number of samples of a micro-batch; None if its tensors differ in it."""
    sizes = {len(tensor) for tensor in tensors if tensor.ndim}
    if len(sizes) == 1:
        return sizes.pop()
    return None


def _idle(stages: Sequence[Stage], options: CutOptions) -> float:
    """Return the predicted bubble, as a share of the time."""
    timeline = simulate(
        options.schedule,
        [stage.forward for stage in stages],
        [stage.backward for stage in stages],
        options.micro_batches,
        options.stages_per_device,
    )
    return timeline.idle


# Messages.


def _too_few_blocks(
    blocks: int,
    options: CutOptions,
    traced: Traced,
    prefix: str,
) -> str:
    """Return the message for more stages than blocks, with ways out."""
    plural = "s" * (blocks != 1)
    message = (
        f"The network has {blocks} block{plural} to cut between, which is not enough for {len(options.devices)} stages."
    )
    advice = _advice_on_uncut_submodule(traced, prefix)
    if blocks > 1:
        or_stages = " or stages_per_device" * (options.stages_per_device > 1)
        message += f" Give fewer devices{or_stages}."
        if advice:
            message += f" Or: {advice}"
        return message
    advice = advice or "Write it as several submodules"
    return f"{message} {advice}, or choose another strategy, such as 'dp' or 'ddp'."


def _advice_on_uncut_submodule(traced: Traced, prefix: str) -> str:
    """Return why the largest submodule that could not be traced is one block, and a remedy; empty if there is none."""
    if not traced.opaque:
        return ""
    largest = largest_opaque(traced)
    submodule = traced.root.get_submodule(f"network.{largest}")
    total = _parameter_count(traced.root)
    share = "none"
    if total:
        share = f"{_parameter_count(submodule) / total:.0%}"
    kind = type(submodule).__name__
    return (
        f"{public_name(largest, True, prefix)!r} ({kind}), which has {share} of the parameters, is one"
        f" block, since it cannot be followed: {traced.opaque[largest]}. Let a submodule of its own, without the large"
        " layers, do what that line does"
    )


def largest_opaque(traced: Traced) -> str:
    """Return the name of the submodule with the most parameters among those that stay whole.

    Args:
        traced: A forward with at least one of them.
    """
    sizes: dict[str, int] = {}
    for name in traced.opaque:
        # A submodule within another one that stays whole is not the reason.
        parents = with_parents(name)[:-1]
        if not any(parent in traced.opaque for parent in parents):
            sizes[name] = _parameter_count(traced.root.get_submodule(f"network.{name}"))
    return max(sizes, key=lambda name: sizes[name])


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _does_not_fit(options: CutOptions, devices: Sequence[StageDevice], peaks: Sequence[int]) -> str:
    """Return the message for a network that does not fit into the devices' memory."""
    if options.stages_per_device == 1:
        owner = "stage"
        verb = "fits"
    else:
        owner = "device"
        verb = "was found that fits"
    needs = []
    for index, (peak, name, device) in enumerate(zip(peaks, options.devices, devices, strict=False)):
        needs.append(f"{owner} {index} on {name} {format_bytes(peak)} of {format_bytes(device.memory or 0)}")
    return (
        f"No cut of the network {verb} into memory; the best would need: {'; '.join(needs)}."
        " More micro_batches, a smaller batch, activation checkpointing, a lower precision or more devices would help."
    )


def narrow_to_micro_batch(tensors: list[Tensor], micro_batches: int) -> list[Tensor]:
    """Return the tensors of a call with one micro-batch.

    Args:
        tensors: The tensors of a call with a full batch. They stay as they are if their numbers of samples differ.
        micro_batches: The number of micro-batches.
    """
    samples = _samples_of(tensors)
    if samples is None:
        return tensors
    # Round up, as the split of a batch does.
    size = -(-samples // micro_batches)
    return [tensor[:size] if tensor.ndim else tensor for tensor in tensors]
