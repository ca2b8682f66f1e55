"""Profile of each call of a network: time forward and backward, activations, sizes of outputs.

The whole network runs several times, and the quickest pass of each call counts. Other work on the machine, or memory
that is touched for the first time, disturbs one pass and not all of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

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


def _tensors_of_call(node: fx.Node, root: nn.Module) -> Sequence[Tensor]:
    """Return the parameters and buffers of the layer that a call runs, or the one that it looks up."""
    if node.op not in ("call_module", "get_attr"):
        return ()
    return parameters_and_buffers(find_part(root, str(node.target)))


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
        tensors = _tensors_of_call(node, self._traced.root)
        parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        layer = self.layer_of(node)
        # A layer of the user's may change its arguments in this call, although it did not in the recorded one.
        is_of_user = layer is not None and not is_of_torch(layer)
        copies_arguments = is_of_user or node in self._traced.changes
        new_run = partial(_Run, self, node, trainable, copies_arguments=copies_arguments)
        run = new_run()

        # 1. Run the call with its layer on the device.
        peak = 0
        left = 0
        with lent(layer, self.device):
            run.measure(self._storages)
            if self._measures_peaks:
                values = list(self.env.values())
                existing = [*tensors_of(values), *parameters]
                peak = peak_bytes(partial(new_run().measure, self._storages), existing)
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
        return block, run.output


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
        self, calls: CallInterpreter, node: fx.Node, trainable: Sequence[nn.Parameter], *, copies_arguments: bool
    ) -> None:
        self.forward = 0.0
        self.backward = 0.0
        self.saved: dict[int, int] = {}
        self.argument_addresses: set[int] = set()
        self.output: Any = None
        self._calls = calls
        self._node = node
        self._trainable = trainable
        self._copies_arguments = copies_arguments
        self._device = calls.device

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
        run: Callable[..., Any] = getattr(self._calls, self._node.op)
        return run(self._node.target, args, kwargs)

    def _arguments(self) -> tuple[Any, Any, list[Tensor]]:
        """Return the arguments of the call as leaves of autograd, and the list of these leaves."""
        inputs: list[Tensor] = []
        as_leaves = partial(_leaves, self._calls.env, inputs)
        arguments = on_device(self._device, (self._node.args, self._node.kwargs))
        args, kwargs = fx.map_arg(arguments, as_leaves)
        if self._copies_arguments:
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
