"""Profile of each call of a network: time forward and backward, activations, sizes of outputs.

The whole network runs several times, and the quickest pass of each call counts. Other work on the machine, or memory
that is touched for the first time, disturbs one pass and not all of them.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.forward.layer_lending import is_of_torch, lent
from equipoise.extensions.pipeline.graph.call_names import names_of
from equipoise.extensions.pipeline.graph.split_backward import SplitBackward
from equipoise.extensions.pipeline.graph.stage_spec import find_part, parameters_and_buffers
from equipoise.extensions.pipeline.graph.stages import map_tensors, may_cut, tensors_of
from equipoise.extensions.pipeline.graph.traced import CallInterpreter, Traced, on_device
from equipoise.extensions.pipeline.planning.measuring import SavedTensors, addresses_of, now, peak_bytes
from equipoise.extensions.pipeline.planning.stage_costs import Block
from equipoise.parallel.snapshot.preserve_state import preserve_state

__all__ = ["profile_calls"]

# Limits for the number of passes.
_LEAST_PASSES = 3
_MOST_PASSES = 8
# Seconds after which no further pass begins, once the least number is done.
_SECONDS = 3.0


def profile_calls(
    traced: Traced,
    module: nn.Module,
    tensors: Sequence[Tensor],
    device: torch.device,
    *,
    split: bool = False,
) -> list[Block]:
    """Measure every call of a forward, one after the other, on a device. The module keeps its state.

    Args:
        traced: The forward.
        module: The user's module, whose buffers and metrics are restored.
        tensors: Tensors of the call, with one micro-batch.
        device: Device of the measurement. Parameters on other devices are lent to it for their call.
        split: True if backwards are split into two halves. Default: False.

    Returns:
        A block for each call.
    """
    with preserve_state(module, containers=True), torch.inference_mode(False), torch.enable_grad():
        inputs = tuple(tensor.detach().clone().to(device) for tensor in tensors)
        begin = time.perf_counter()

        # 1. The first pass also measures memory.
        first_pass = _Pass(traced, device, measures_peaks=True, split=split)
        first_pass.run(inputs)
        blocks = first_pass.blocks

        # 2. The others measure time only.
        for count in range(1, _MOST_PASSES):
            elapsed = time.perf_counter() - begin
            if count >= _LEAST_PASSES and elapsed > _SECONDS:
                break
            next_pass = _Pass(traced, device, measures_peaks=False, split=False)
            next_pass.run(inputs)
            blocks = list(map(Block.quicker, blocks, next_pass.blocks))

        return blocks


class _Pass(CallInterpreter):
    """Run all calls of a forward once, and measure each of them.

    Attributes:
        blocks: A block for each call so far.
    """

    def __init__(self, traced: Traced, device: torch.device, *, measures_peaks: bool, split: bool) -> None:
        super().__init__(traced.root, traced.graph, device)
        self.blocks: list[Block] = []
        self._traced = traced
        self._names = names_of(traced)
        self._may_end = may_cut(traced)
        self._measures_peaks = measures_peaks
        self._split = split
        self._storages = SavedTensors(traced.root)

    def run_node(self, node: fx.Node) -> Any:
        """Measure a call, and return its value as leaves of autograd."""
        self._end_call()
        if node.op in ("placeholder", "output"):
            return super().run_node(node)
        block, output = self._measure(node)
        index = len(self.blocks)
        name, is_named = self._names[index]
        self.blocks.append(replace(block, name=name, named=is_named, may_end=self._may_end[index]))
        return map_tensors(_as_leaf, output)

    def _end_call(self) -> None:
        """Count what passes from the last call to later ones, and forget the storages of all other values."""
        # Values without a later use are released by now, but for those that no call uses at all.
        values = []
        for node, value in self.env.items():
            if node.users:
                values.append(value)
        passing = tensors_of(values)
        if self.blocks:
            sent = self._storages.passing(passing)
            self.blocks[-1] = replace(self.blocks[-1], boundary=sum(sent.values()), passing=sent)
        self._storages.keep_only(passing)

    def _measure(self, node: fx.Node) -> tuple[Block, Any]:
        """Return the costs of a call, without what passes to later ones, and its value."""
        layer = self.layer_of(node)
        # A layer of the user's may change its arguments in this call, although it did not in the recorded one.
        is_of_user = layer is not None and not is_of_torch(layer)
        copies_arguments = is_of_user or node in self._traced.changes
        call = _CallMeasurement(self, node, self._storages, copies_arguments=copies_arguments)

        # 1. Run the call with its layer on the device.
        peak = 0
        left = 0
        with lent(layer, self.device):
            costs = call.measure()
            if self._measures_peaks:
                values = list(self.env.values())
                peak = peak_bytes(call.measure, [*tensors_of(values), *call.tensors])
            if self._split:
                left = call.left_bytes()

        # 2. Count what it keeps. The peak contains that, and its output.
        outputs = tensors_of(costs.output)
        saved, saves = self._storages.add(costs.saved, outputs)
        block = Block(
            name="",
            forward=costs.forward,
            backward=costs.backward,
            parameters=sum(tensor.nbytes for tensor in call.tensors),
            trained=sum(parameter.nbytes for parameter in call.trainable),
            saved=saved,
            saves=saves,
            left=left,
            transient=max(0, peak - _kept_bytes(costs, outputs)),
        )
        return block, costs.output


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


class _CallCosts(NamedTuple):
    """Costs of one run of a call.

    Attributes:
        forward, backward: Seconds.
        saved: Addresses of the storages that the forward saved, and their bytes.
        argument_addresses: Addresses of the storages of its arguments.
        output: Value of the call.
    """

    forward: float
    backward: float
    saved: dict[int, int]
    argument_addresses: set[int]
    output: Any


def _kept_bytes(costs: _CallCosts, outputs: Iterable[Tensor]) -> int:
    """Return the bytes that a call adds to those that are there before it: what it has saved, and its outputs."""
    nbytes = dict(costs.saved)
    for address in costs.argument_addresses:
        nbytes.pop(address, None)
    for tensor in outputs:
        storage = tensor.untyped_storage()
        nbytes[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes.values())


class _CallMeasurement:
    """Runs one call and its backward, as often as they are measured.

    Attributes:
        tensors: Parameters and buffers of the layer that the call runs, or the tensor that it looks up.
        trainable: The parameters among them that require gradients.
    """

    def __init__(
        self, calls: CallInterpreter, node: fx.Node, storages: SavedTensors, *, copies_arguments: bool
    ) -> None:
        self.tensors: Sequence[Tensor] = ()
        if node.op in ("call_module", "get_attr"):
            self.tensors = parameters_and_buffers(find_part(calls.module, str(node.target)))
        self.trainable: list[Tensor] = []
        for tensor in self.tensors:
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                self.trainable.append(tensor)
        self._calls = calls
        self._node = node
        self._storages = storages
        self._copies_arguments = copies_arguments
        self._device = calls.device

    def measure(self) -> _CallCosts:
        """Measure time and saved storages."""
        args, kwargs, inputs = self._arguments()
        argument_addresses = addresses_of(tensors_of((args, kwargs)))
        weights = self._weights()

        saved: dict[int, int] = {}
        begin = now(self._device)
        with self._storages.watch(saved, weights):
            output = self._call(args, kwargs)
        forward = now(self._device) - begin
        backward = self._run_backward(tensors_of(output), inputs)
        return _CallCosts(forward, backward, saved, argument_addresses, output)

    def left_bytes(self) -> int:
        """Return the bytes that the first half of a split backward leaves for the second, beside what is saved."""
        args, kwargs, inputs = self._arguments()
        outputs = tensors_of(self._call(args, kwargs))
        gradients = [torch.ones_like(tensor) if tensor.requires_grad else None for tensor in outputs]
        split = SplitBackward(inputs, outputs)
        split.of_inputs(gradients)
        return split.nbytes

    def _weights(self) -> list[Tensor]:
        """Return the tensors on the device that are no activations: of the layer, and those that calls looked up."""
        looked_up = [value for node, value in self._calls.env.items() if node.op == "get_attr"]
        return [*self.tensors, *tensors_of(looked_up)]

    def _call(self, args: Any, kwargs: Any) -> Any:
        run: Callable[..., Any] = getattr(self._calls, self._node.op)
        return run(self._node.target, args, kwargs)

    def _arguments(self) -> tuple[Any, Any, list[Tensor]]:
        """Return the arguments of the call as leaves of autograd, and the list of these leaves."""
        inputs: list[Tensor] = []

        def as_input(tensor: Tensor) -> Tensor:
            leaf = _as_leaf(tensor)
            inputs.append(leaf)
            return leaf

        def value_of(node: fx.Node) -> Any:
            return map_tensors(as_input, self._calls.env[node])

        arguments = on_device(self._device, (self._node.args, self._node.kwargs))
        args, kwargs = fx.map_arg(arguments, value_of)
        if self._copies_arguments:
            # Leaves and the values of earlier calls must not change.
            args = map_tensors(torch.clone, args)
            kwargs = map_tensors(torch.clone, kwargs)
        return args, kwargs, inputs

    def _run_backward(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> float:
        """Run the backward of a call, and return its seconds."""
        outputs = _requiring_grad(outputs)
        leaves = _requiring_grad(inputs)
        sources = [*leaves, *self.trainable]
        if not outputs or not sources:
            return 0.0
        ones = [torch.ones_like(tensor) for tensor in outputs]

        begin = now(self._device)
        gradients = torch.autograd.grad(outputs, sources, ones, allow_unused=True)
        # A step also adds the gradients of weights to those of earlier micro-batches. It adds sparse ones otherwise,
        # and one that is not contiguous may have elements that share their memory.
        for gradient in gradients[len(leaves) :]:
            if gradient is not None and gradient.layout is torch.strided and gradient.is_contiguous():
                gradient.add_(gradient)
        return now(self._device) - begin


def _requiring_grad(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]
