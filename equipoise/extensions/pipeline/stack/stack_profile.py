"""Times and memory of a network whose forward runs as it is, for each layer of a stack and what lies around it.

The forward and its backward run several times on one device, and the quickest pass of each layer counts. What comes
before the first layer counts as a part of it, and what follows a layer as a part of that layer.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.pipeline.forward.forward_effects import ForwardEffects
from equipoise.extensions.pipeline.forward.layer_lending import computed_on, lent
from equipoise.extensions.pipeline.forward.saved_tensors import REENTRANT_CHECKPOINTING
from equipoise.extensions.pipeline.graph.call_structure import NetworkCall
from equipoise.extensions.pipeline.graph.stage_spec import parameters_and_buffers
from equipoise.extensions.pipeline.graph.stages import tensors_of
from equipoise.extensions.pipeline.planning.measuring import addresses_of, now, saved_storages
from equipoise.extensions.pipeline.planning.stage_costs import Block
from equipoise.extensions.pipeline.stack.layer_stack import LayerStack

__all__ = ["StackProfile", "profile_stack"]

_PASSES = 3


@dataclass(frozen=True)
class StackProfile:
    """Costs of a stack's layers, and the tensors around them.

    Attributes:
        blocks: A block for each layer.
        before: Parameters and buffers outside of the layers that the forward uses before the first of them.
        side_effect: Change of an attribute or of a container in one, as a predicate. The forward of the next
            micro-batch, which begins before this one ends, would find it. Empty if there is none.
        repeats_random_layers: True if the backward computes layers again, and the forward draws random numbers.
    """

    blocks: list[Block]
    before: list[Tensor]
    side_effect: str
    repeats_random_layers: bool


def profile_stack(stack: LayerStack, call: NetworkCall) -> StackProfile:
    """Measure the layers of a stack on the device of a call. The module keeps its state.

    Args:
        stack: The stack.
        call: The network's call with one micro-batch.
    """
    # 1. Run the forward and its backward several times.
    passes = []
    side_effect = ""
    network = call.network
    for _ in range(_PASSES):
        # The backward needs the weights where the forward has used them, so the whole network is on the device.
        with call.preserved(), lent(network, call.device), computed_on(call.device, network, call.module):
            # In stages, the next micro-batch would find what a forward keeps.
            effects = ForwardEffects(network)
            measurement = _Pass(stack, call)
            measurement.run()
            side_effect = side_effect or effects.describe(network, kept_only=True)
        passes.append(measurement)

    # 2. What lies around the layers belongs to the first and to the last.
    first_pass = passes[0]
    before, after = _tensors_around(network, stack, first_pass.called_before)
    tensors_of_layers = [[*parameters_and_buffers(layer)] for layer in stack.values()]
    tensors_of_layers[0] += before
    tensors_of_layers[-1] += after

    # 3. Take the quickest times of each layer, and the memory of the first pass.
    blocks = []
    for index, (name, tensors) in enumerate(zip(stack, tensors_of_layers, strict=True)):
        block = Block(
            name=name,
            forward=min(measurement.forward_seconds[index] for measurement in passes),
            backward=min(measurement.backward_seconds[index] for measurement in passes),
            saved=first_pass.saved[index],
            boundary=first_pass.boundaries[index],
            parameters=sum(tensor.nbytes for tensor in tensors),
            trained=sum(tensor.nbytes for tensor in tensors if tensor.requires_grad),
        )
        blocks.append(block)
    repeats_random_layers = first_pass.repeats_layers and first_pass.draws_numbers
    return StackProfile(blocks, before, side_effect, repeats_random_layers)


def _tensors_around(
    network: nn.Module, stack: LayerStack, called_before: Collection[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters and buffers outside of the layers: of modules called before the first one, and of others.

    Args:
        network: The network.
        stack: Its layers.
        called_before: Ids of the modules that are called before the first layer.
    """
    before: list[Tensor] = []
    after: list[Tensor] = []
    for module in _modules_around(network, stack):
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if id(module) in called_before:
            before.extend(tensors)
        else:
            after.extend(tensors)
    return before, after


class _Pass:
    """One forward and backward.

    Attributes:
        forward_seconds, backward_seconds: Durations of each layer.
        saved: Bytes that each layer is the first to keep for its backward.
        boundaries: Bytes that pass from each layer to the next; 0 for the last.
        draws_numbers: True if the forward has drawn random numbers on the device.
        repeats_layers: True if the backward has computed a layer again.
        called_before: Ids of the modules whose first call came before the first layer.
    """

    def __init__(self, stack: LayerStack, call: NetworkCall) -> None:
        count = len(stack)
        self.forward_seconds = [0.0] * count
        self.backward_seconds = [0.0] * count
        self.saved = [0] * count
        self.boundaries = [0] * count
        self.draws_numbers = False
        self.repeats_layers = False
        # The network itself is called by its forward.
        self.called_before = {id(call.network)}
        self._stack = stack
        self._call = call
        self._device = call.device
        # The layer for which time and memory count now: what precedes the first one counts for it.
        self._layer = 0
        self._has_entered = False
        self._in_backward = False
        self._since = 0.0
        # Storages of parameters, of buffers, and of what earlier layers have saved.
        self._counted_addresses = addresses_of(parameters_and_buffers(call.network))
        # Bytes that the present layer has saved, by the address of their storage.
        self._newly_saved: dict[int, int] = {}
        # By layer, the time when the gradient of its first argument was there.
        self._arrivals: dict[int, float] = {}
        self._hooks = ExitStack()

    def run(self) -> None:
        """Run the forward and its backward."""
        with self._hooks as context:
            # 1. Notice when modules are called.
            for index, layer in enumerate(self._stack.values()):
                enter = partial(self._enter, index)
                context.enter_context(layer.register_forward_pre_hook(enter, with_kwargs=True))
            for module in _modules_around(self._call.network, self._stack):
                context.enter_context(module.register_forward_pre_hook(self._on_call))
            context.enter_context(torch.inference_mode(False))
            context.enter_context(torch.enable_grad())

            # 2. Run the forward.
            args, kwargs = self._call.structure.fill(self._call.copied_tensors())
            random_state = _random_state(self._device)
            self._since = now(self._device)
            with saved_storages(self._newly_saved, self._counted_addresses):
                output = self._call.forward(*args, **kwargs)
            self._end_layer()
            self.draws_numbers = not torch.equal(_random_state(self._device), random_state)

            # 3. Run the backward.
            self._in_backward = True
            self._run_backward(output)

    def _on_call(self, module: nn.Module, args: Any) -> None:
        if not self._has_entered:
            self.called_before.add(id(module))

    def _enter(self, index: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        # Activation checkpointing computes layers again in the backward, and their times belong to it.
        if self._in_backward:
            self.repeats_layers = True
            return
        if self._has_entered:
            self._end_layer()
        self._has_entered = True
        # What the layer receives passes from the layer before.
        tensors = tensors_of((args, kwargs))
        if index > self._layer:
            self.boundaries[index - 1] = sum(tensor.nbytes for tensor in tensors)
        self._layer = index
        # Its backward ends when the gradient of an argument is computed.
        for tensor in tensors:
            if tensor.requires_grad:
                on_gradient = partial(self._on_gradient, index)
                # An argument may be a parameter, which stays.
                self._hooks.enter_context(tensor.register_hook(on_gradient))  # type: ignore[no-untyped-call]
                break

    def _end_layer(self) -> None:
        """Count the time since the last layer was entered as its own, and what was saved since then."""
        present = now(self._device)
        self.forward_seconds[self._layer] += present - self._since
        self._since = present
        self.saved[self._layer] += sum(self._newly_saved.values())
        self._counted_addresses.update(self._newly_saved)
        self._newly_saved.clear()

    def _on_gradient(self, index: int, gradient: Tensor) -> None:
        """Note when the gradient of a layer's argument is computed; that of the first call counts."""
        self._arrivals.setdefault(index, now(self._device))

    def _run_backward(self, output: Any) -> None:
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        parameters = [parameter for parameter in self._call.network.parameters() if parameter.requires_grad]
        if not outputs or not parameters:
            return
        ones = [torch.ones_like(output) for output in outputs]
        begin = now(self._device)
        try:
            torch.autograd.grad(outputs, parameters, ones, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                raise ConfigurationError(REENTRANT_CHECKPOINTING) from error
            raise
        self._divide_backward(begin, now(self._device))

    def _divide_backward(self, begin: float, end: float) -> None:
        """Give each layer the time from the gradient of the next layer's argument to that of its own argument."""
        start = begin
        # The backward goes through the last layer first. What comes before the first layer belongs to it.
        for index in reversed(range(len(self.backward_seconds))):
            arrival = self._arrivals.get(index, start) if index else end
            self.backward_seconds[index] = max(0.0, arrival - start)
            start = max(start, arrival)


def _modules_around(network: nn.Module, stack: LayerStack) -> list[nn.Module]:
    """Return the modules of a network that are neither layers of a stack nor parts of them."""
    inside = {id(part) for layer in stack.values() for part in layer.modules()}
    return [module for module in network.modules() if id(module) not in inside]


def _random_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()
