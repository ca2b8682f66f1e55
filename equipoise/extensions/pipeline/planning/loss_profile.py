"""Time and memory of the part of a step after the network: the loss, computed beside the last stage.

The step runs a few extra times, before anything else does, on the first micro-batch. Its call of the network returns
the output of the profile of the network's calls. Changes in the module are undone.
"""

import time
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.pipeline.execution.placement import move
from equipoise.extensions.pipeline.graph.stages import map_tensors
from equipoise.extensions.pipeline.planning.measuring import addresses_of, now, peak_bytes, saved_storages
from equipoise.extensions.pipeline.planning.stage_costs import Block
from equipoise.interop.torch.dispatch import tensors_in
from equipoise.parallel.snapshot.batch_contents import BatchContents
from equipoise.parallel.snapshot.preserve_state import preserve_state
from equipoise.parallel.step_protocols import StepResult

__all__ = ["LossProfile"]

# Number of passes, of which the quickest counts. The first pass also measures the peak of memory.
_PASSES = 3
# Seconds after which no pass begins.
_SECONDS = 2.0


class LossProfile:
    """Measure what a training step computes after its call of the network.

    Args:
        module: The user's module.
        step: Runs its training step on a micro-batch.
        batch: That micro-batch, before its step begins.
        device: Device of the step, and of layers outside of the network.
        caught: Makes a context in which calls of the network reach `network_output` while `running` is True.

    Attributes:
        block: The result, as a block of the last stage; None before, and if the step cannot be measured.
        running: True if `network_output` replaces the network's call.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Callable[[], StepResult],
        batch: Any,
        device: torch.device,
        caught: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.block: Block | None = None
        self.running = False
        self._module = module
        self._step = step
        self._device = device
        self._caught = caught
        self._contents = BatchContents(batch)
        # The step may take tensors out of the batch, so they are noted before it begins.
        self._inputs = list(tensors_in(batch))
        # Parameters and buffers that the network does not use.
        self._beside: list[Tensor] = []

        # Of one pass: the network's output, its copies as leaves, the time after its call, bytes saved by address.
        self._output: Any = None
        self._begun: tuple[list[Tensor], float] | None = None
        self._saved: dict[int, int] = {}
        self._watch = ExitStack()

    def measure(self, used: Set[int], output: Any) -> None:
        """Run the step several times and set `block`.

        Args:
            used: Identities of the tensors that the network uses. Others are moved to the device.
            output: The network's output.
        """
        self._place_beside(used)
        self._output = output
        # The step that waits for the network's output has begun already, and may have changed the batch.
        present = self._contents.now()
        begin = time.perf_counter()
        try:
            for count in range(_PASSES):
                if count > 1 and time.perf_counter() - begin > _SECONDS:
                    break
                self._contents.restore()
                with preserve_state(self._module, containers=True), self._caught():
                    block = self._run_pass(measures_peak=count == 0)
                if block is None:
                    return
                if self.block is not None:
                    block = self.block.quicker(block)
                self.block = block
        except Exception:
            # If the error is not one of measuring, the step itself raises it next.
            self.block = None
        finally:
            self._output = None
            self._begun = None
            present.restore()

    def _place_beside(self, used: Set[int]) -> None:
        """Move tensors that the network does not use to the device of the step."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        self._beside = [tensor for tensor in tensors if id(tensor) not in used]
        for tensor in self._beside:
            if tensor.device != self._device:
                move(tensor, self._device)

    def network_output(self) -> Any:
        """Return the network's output in place of its call.

        Raises:
            StepError: If the step calls the network a second time. The pipeline itself then reports that.
        """
        if self._begun is not None:
            raise StepError("The network is called twice.")
        leaves: list[Tensor] = []

        def as_leaf(tensor: Tensor) -> Tensor:
            leaf = tensor.detach().to(self._device).requires_grad_(tensor.requires_grad)
            leaves.append(leaf)
            return leaf

        output = map_tensors(as_leaf, self._output)

        # Watch what autograd saves from here on.
        existing = addresses_of([*leaves, *self._inputs, *self._module.parameters()])
        self._saved = {}
        self._watch.enter_context(saved_storages(self._saved, existing))
        self._begun = leaves, now(self._device)
        return output

    def _run_pass(self, *, measures_peak: bool) -> Block | None:
        """Run the step once. Return None if it does not call the network."""
        # 1. Run the forward.
        self.running = True
        try:
            with self._watch:
                result = self._step()
        finally:
            self.running = False
        if self._begun is None:
            return None
        leaves, begin = self._begun
        forward = now(self._device) - begin
        self._begun = None
        loss = result.loss
        trainable_bytes = sum(tensor.nbytes for tensor in self._beside if tensor.requires_grad)
        block = Block(
            name="",
            forward=forward,
            parameters=sum(tensor.nbytes for tensor in self._beside),
            trained=trainable_bytes,
            saved=sum(self._saved.values()),
        )
        if loss is None or loss.grad_fn is None:
            return block

        # 2. Run the backward, once for its time, and once more for its peak.
        tensors = [*leaves, *self._module.parameters()]
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        begin = now(self._device)
        torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=measures_peak)
        backward = now(self._device) - begin
        transient = 0
        if measures_peak:
            run_backward = partial(torch.autograd.grad, loss, inputs, allow_unused=True)
            peak = peak_bytes(run_backward, [loss, *inputs])
            # Gradients of parameters stay; `trained` counts them.
            transient = max(0, peak - trainable_bytes)
        return replace(block, backward=backward, transient=transient)
