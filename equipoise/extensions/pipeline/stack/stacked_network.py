"""A network that is cut between the layers of its largest stack, because its forward cannot be followed."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.pipeline.execution.placement import Placement
from equipoise.extensions.pipeline.graph.call_structure import NetworkCall
from equipoise.extensions.pipeline.planning.cut import Cut, CutOptions, PinnedCut, public_name
from equipoise.extensions.pipeline.planning.measured_cut import best_cut
from equipoise.extensions.pipeline.stack.layer_stack import LayerStack, largest_stack
from equipoise.extensions.pipeline.stack.stack_pipeline import StackPipeline
from equipoise.extensions.pipeline.stack.stack_profile import StackProfile, profile_stack

__all__ = ["StackedNetwork"]


class StackedNetwork:
    """Cuts a network between layers, places it, and makes its stages.

    Args:
        name: Name of the network in the user's module.
        options: Devices, schedule, micro-batches.
        stack: The layers between which the network is cut.
    """

    def __init__(self, name: str, options: CutOptions, stack: LayerStack) -> None:
        self._options = options
        self._stack = stack
        # Names of the layers in the user's module.
        self._layer_names = [public_name(layer_name, True, name) for layer_name in stack]
        self._profile: StackProfile | None = None
        # The stage of each layer, once the network is placed.
        self._stages: dict[nn.Module, int] = {}

    @classmethod
    def of(cls, network: nn.Module, name: str, options: CutOptions) -> "StackedNetwork | None":
        """Return a network that can be cut into this number of stages between layers; None if it has too few.

        Args:
            network: The network.
            name: Name of the network in the user's module.
            options: Devices, schedule, micro-batches.
        """
        stack = largest_stack(network)
        if stack is None or len(stack) < len(options.devices):
            return None
        return cls(name, options, stack)

    def cut(
        self,
        call: NetworkCall,
        names: Sequence[str] | None,
        pinned: PinnedCut | None,
    ) -> Cut | None:
        """Return the cut; None if the forward keeps something, or the user names other modules than layers.

        Args:
            call: Its call with one micro-batch, on the device of the measurement.
            names: Layers to cut before; None: chosen by measuring.
            pinned: The cut of an earlier run; None if there is none.

        Raises:
            ConfigurationError: If activation checkpointing would draw other random numbers in the backward.
        """
        # 1. Measure. The order of calls also shows what comes before and after the layers.
        profile = profile_stack(self._stack, call)
        self._profile = profile
        # Several micro-batches are in the forward at the same time.
        if profile.side_effect:
            return None
        # Checkpointing restores generators of the devices on which a layer's arguments lie, not of the layer's device.
        if profile.repeats_random_layers and len(set(self._options.devices)) > 1:
            raise ConfigurationError(
                f"Layers of {type(call.network).__name__} draw random numbers within activation checkpointing. Stages"
                " on several devices would draw others when the backward computes the layers again. Set their rates"
                " of dropout to 0, or train without activation checkpointing."
            )
        # 2. A cut that is given needs no more.
        if names is not None:
            return self._cut_by_names(names)
        if pinned is not None:
            earlier_cut = self._cut_by_names(pinned.names)
            if earlier_cut is not None and len(earlier_cut.ends) == len(self._options.devices):
                return earlier_cut
        # 3. Choose the best one.
        return best_cut(profile.blocks, self._options, call.structure.tensors, self._cut_at)

    def _cut_by_names(self, names: Sequence[str]) -> Cut | None:
        """Return the cut before layers; None if these are no layers of the stack, in their order."""
        # The first stage begins with the input, so no name may be that of the first layer.
        ends = []
        for name in names:
            if name not in self._layer_names:
                return None
            ends.append(self._layer_names.index(name))
        if ends != sorted(set(ends)) or 0 in ends:
            return None
        return self._cut_at([*ends, len(self._layer_names)])

    def _cut_at(self, ends: Sequence[int]) -> Cut:
        """Return a cut without predictions, from the index of the layer after the last of each stage."""
        first_layers = ["", *(self._layer_names[end] for end in ends[:-1])]
        return Cut(ends=list(ends), first_blocks=first_layers, first_calls=first_layers, stages=[], idle=None)

    def place(self, cut: Cut, placement: Placement) -> list[int]:
        """Place the layers and what lies around them, and return the bytes of each stage.

        Args:
            cut: The cut.
            placement: Moves tensors to their devices.
        """
        assert self._profile is not None
        parts: list[list[Any]] = []
        begin = 0
        layers = list(self._stack.values())
        for stage, end in enumerate(cut.ends):
            layers_of_stage = layers[begin:end]
            parts.append([*layers_of_stage])
            self._stages |= dict.fromkeys(layers_of_stage, stage)
            begin = end
        parts[0] += self._profile.before
        return placement.place_parts(parts)

    def pipeline(self, forward: Callable[..., Any], *, threads: bool | None) -> StackPipeline:
        """Return the stages.

        Args:
            forward: The network's own forward.
            threads: See `Pipeline`.
        """
        options = self._options
        return StackPipeline(
            forward,
            self._stages,
            options.devices,
            options.schedule,
            stages_per_device=options.stages_per_device,
            threads=threads,
        )
