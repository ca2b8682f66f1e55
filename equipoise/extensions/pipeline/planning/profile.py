"""Profile of each call of a network: time forward and backward, activations, sizes of outputs.

The whole network runs several times, and the quickest pass of each call counts. Other work on the machine, or memory
that is touched for the first time, disturbs one pass and not all of them.
"""

import time
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from equipoise.extensions.pipeline.forward.layer_lending import is_of_torch, lent
from equipoise.extensions.pipeline.graph.call_names import names_of
from equipoise.extensions.pipeline.graph.split_backward import SplitBackward
from equipoise.extensions.pipeline.graph.stage_spec import parameters_and_buffers
from equipoise.extensions.pipeline.graph.stages import crossing, map_tensors, may_cut, tensors_of
from equipoise.extensions.pipeline.graph.traced import Traced, on_device
from equipoise.extensions.pipeline.planning.activation_memory import SavedTensors, addresses_of, peak_bytes
from equipoise.extensions.pipeline.planning.stage_costs import Block
from equipoise.extensions.pipeline.planning.traced_calls import (
    layer_of,
    now,
    output_of,
    part_of,
    run_call,
    used_tensors,
)
from equipoise.parallel.snapshot.preserve_state import preserve_state

__all__ = ["profile_calls"]

# Limits for the number of passes.
_LEAST_PASSES = 3
_MOST_PASSES = 8
# Seconds after which no pass begins, once there were so many.
_SECONDS = 3.0

# Measures what a step computes after the network; receives the identities of the tensors that the network uses, and its
# output.
MeasureRest = Callable[[Set[int], Any], None]


def profile_calls(
    traced: Traced,
    module: nn.Module,
    tensors: Sequence[Tensor],
    device: torch.device,
    *,
    split: bool = False,
    rest: MeasureRest | None = None,
) -> list[Block]:
    """Measure every call of a forward, one after the other, on a device. The module keeps its state.

    Args:
        traced: The forward.
        module: The user's module, whose buffers and metrics are restored.
        tensors: Tensors of the call, with one micro-batch.
        device: Device of the measurement. Parameters on other devices are lent to it for their call.
        split: True if backwards are split into two halves. Default: False.
        rest: Called at the end with the identities of the used tensors and the output. Default: None.

    Returns:
        A block for each call.
    """
    with preserve_state(module, containers=True), torch.inference_mode(False), torch.enable_grad():
        inputs = tuple(tensor.detach().clone().to(device) for tensor in tensors)
        begin = time.perf_counter()

        # 1. The first pass also measures memory.
        first_pass = _Pass(traced, inputs, device, measures_peaks=True, split=split)
        blocks = first_pass.run()

        # 2. The others measure time only.
        for count in range(1, _MOST_PASSES):
            elapsed = time.perf_counter() - begin
            if count >= _LEAST_PASSES and elapsed > _SECONDS:
                break
            next_blocks = _Pass(traced, inputs, device, measures_peaks=False, split=False).run()
            blocks = list(map(Block.quicker, blocks, next_blocks))

        if rest is not None:
            rest(used_tensors(traced), first_pass.output)
        return blocks


class _Pass:
    """Run all calls of a forward once, and measure each of them.

    Attributes:
        output: Output of the forward; None before `run`.
    """

    def __init__(
        self,
        traced: Traced,
        inputs: tuple[Tensor, ...],
        device: torch.device,
        *,
        measures_peaks: bool,
        split: bool,
    ) -> None:
        self.output: Any = None
        self._traced = traced
        self._device = device
        self._measures_peaks = measures_peaks
        self._split = split
        self._values: dict[fx.Node, Any] = {traced.only_node("placeholder"): inputs}
        self._storages = SavedTensors(traced.root)
        self._storages.keep_only(inputs)

    def run(self) -> list[Block]:
        """Return a block for each call."""
        traced = self._traced
        values = self._values
        calls = traced.calls
        ends = range(1, len(calls) + 1)
        passing = crossing(traced, ends)
        last_use: dict[fx.Node, int] = {}
        for index, nodes in enumerate(passing):
            for node in nodes:
                last_use[node] = index
        names = names_of(traced)

        may_end = may_cut(traced)

        blocks = []
        for index, node in enumerate(calls):
            # 1. Measure the call.
            block, values[node] = self._measure(node)

            # 2. Count what passes to later calls.
            passing_tensors = tensors_of([values[later] for later in passing[index]])
            sent = self._storages.passing(passing_tensors)
            name, is_named = names[index]
            block = replace(
                block,
                name=name,
                named=is_named,
                boundary=sum(sent.values()),
                passing=sent,
                may_end=may_end[index],
            )
            blocks.append(block)

            # 3. Release what no later call uses.
            unused = [value for value in values if last_use.get(value, -1) < index]
            for value in unused:
                del values[value]
            alive = tensors_of(list(values.values()))
            self._storages.keep_only(alive)
        self.output = output_of(traced, values)
        return blocks

    def _measure(self, node: fx.Node) -> tuple[Block, Any]:
        """Return the costs of a call, without what passes to later ones, and its value."""
        layer = layer_of(node, self._traced.root)
        part = part_of(node, self._traced.root)
        parameters = [tensor for tensor in parameters_and_buffers(part) if isinstance(tensor, nn.Parameter)]
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        run = _Run(node, self._traced, self._values, trainable, self._device)

        # 1. Run the call with its layer on the device.
        peak = 0
        left = 0
        with lent(layer, self._device):
            run.measure(self._storages)
            if self._measures_peaks:
                existing = tensors_of(list(self._values.values()))
                peak = peak_bytes(run.repeat, [*existing, *parameters])
            if self._split:
                left = run.left_bytes()

        # 2. Count what it keeps. The peak contains that, and its output.
        outputs = tensors_of(run.output)
        saved, saves = self._storages.add(run.saved, outputs)
        kept_bytes = dict(run.saved)
        for address in run.argument_addresses:
            kept_bytes.pop(address, None)
        for tensor in outputs:
            storage = tensor.untyped_storage()
            kept_bytes[storage.data_ptr()] = storage.nbytes()

        block = Block(
            name="",
            forward=run.forward,
            backward=run.backward,
            parameters=sum(parameter.nbytes for parameter in parameters),
            trained=sum(parameter.nbytes for parameter in trainable),
            saved=saved,
            saves=saves,
            left=left,
            transient=max(0, peak - sum(kept_bytes.values())),
        )
        return block, map_tensors(_as_leaf, run.output)


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


class _Run:
    """Run one call and its backward.

    Attributes:
        forward, backward: Seconds.
        saved: Addresses of the storages that the last forward saved, and their bytes.
        argument_addresses: Addresses of the storages of its arguments.
        output: Value of the call.
    """

    def __init__(
        self,
        node: fx.Node,
        traced: Traced,
        values: dict[fx.Node, Any],
        trainable: Sequence[nn.Parameter],
        device: torch.device,
    ) -> None:
        self.forward = 0.0
        self.backward = 0.0
        self.saved: dict[int, int] = {}
        self.argument_addresses: set[int] = set()
        self.output: Any = None
        self._node = node
        self._traced = traced
        self._values = values
        self._trainable = trainable
        self._device = device

    def measure(self, storages: SavedTensors) -> None:
        """Measure time and saved storages."""
        self.output = None
        self.saved = {}
        args, kwargs, inputs = self._arguments()
        self.argument_addresses = addresses_of(tensors_of((args, kwargs)))

        begin = now(self._device)
        with storages.watch(self.saved):
            self.output = self._call(args, kwargs)
        self.forward = now(self._device) - begin
        self.backward = self._run_backward(inputs)

    def repeat(self) -> None:
        """Run forward and backward once more, and keep nothing of it."""
        args, kwargs, inputs = self._arguments()
        output = self.output
        self.output = self._call(args, kwargs)
        self._run_backward(inputs)
        self.output = output

    def left_bytes(self) -> int:
        """Return the bytes that the first half of a split backward leaves for the second, beside what is saved."""
        args, kwargs, inputs = self._arguments()
        output = self._call(args, kwargs)
        outputs = tensors_of(output)
        gradients = [torch.ones_like(output) if output.requires_grad else None for output in outputs]
        split = SplitBackward(inputs, outputs)
        split.of_inputs(gradients)
        return split.nbytes

    def _call(self, args: Any, kwargs: Any) -> Any:
        return run_call(self._node, self._traced.root, args, kwargs, self._device)

    def _arguments(self) -> tuple[Any, Any, list[Tensor]]:
        """Return the arguments of the call as leaves of autograd, and the list of these leaves."""
        node = self._node
        inputs: list[Tensor] = []
        as_leaves = partial(_leaves, self._values, inputs)
        arguments = on_device(self._device, (node.args, node.kwargs))
        args, kwargs = fx.map_arg(arguments, as_leaves)
        layer = layer_of(node, self._traced.root)
        is_of_user = layer is not None and not is_of_torch(layer)
        # A layer of the user's may change its arguments in this call, although it did not in the recorded one.
        if is_of_user or node in self._traced.changes:
            # Leaves and the values of earlier calls must not change.
            args = map_tensors(torch.clone, args)
            kwargs = map_tensors(torch.clone, kwargs)
        return args, kwargs, inputs

    def _run_backward(self, inputs: Sequence[Tensor]) -> float:
        outputs = _requiring_grad(tensors_of(self.output))
        leaves = _requiring_grad(inputs)
        sources = [*leaves, *self._trainable]
        if not outputs or not sources:
            return 0.0
        ones = [torch.ones_like(tensor) for tensor in outputs]

        begin = now(self._device)
        gradients = torch.autograd.grad(outputs, sources, ones, allow_unused=True)
        # A step also adds the gradients of weights to those of earlier micro-batches.
        gradients_of_weights = gradients[len(leaves) :]
        for gradient in gradients_of_weights:
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if gradient.is_contiguous():
                gradient.add_(gradient)
        return now(self._device) - begin


def _requiring_grad(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.requires_grad]


def _leaves(values: dict[fx.Node, Any], inputs: list[Tensor], node: fx.Node) -> Any:
    """Return the value of a call with its tensors as leaves of autograd, which are added to `inputs`."""

    def as_input(tensor: Tensor) -> Tensor:
        leaf = _as_leaf(tensor)
        inputs.append(leaf)
        return leaf

    return map_tensors(as_input, values[node])
