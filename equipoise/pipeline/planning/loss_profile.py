"""Time and memory of the part of a step after the network: the loss, computed beside the last stage.

The step runs a few times more, before anything else does, on the first micro-batch: where it calls the network it is
given what measuring the network's calls came to. Whatever it changes in the module is put back.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from equipoise.errors import StepError
from equipoise.interop.torch.dispatch import tensors_in
from equipoise.parallel.snapshot.batch_contents import BatchContents
from equipoise.parallel.snapshot.preserve_state import preserve_state
from equipoise.parallel.step_protocols import StepResult
from equipoise.pipeline.execution.placement import move
from equipoise.pipeline.graph.stages import map_tensors
from equipoise.pipeline.graph.tracing import Traced
from equipoise.pipeline.planning.activation_memory import moment
from equipoise.pipeline.planning.profile import now, used_tensors
from equipoise.pipeline.planning.stage_costs import Block

__all__ = ["LossProfile", "containers_kept"]

_PASSES = 3  # of which the quickest counts; the first also says what is needed for a moment
_SECONDS = 2.0  # after which no pass begins
_CONTAINERS = (list, dict, set, deque)


class LossProfile:
    """Measures it.

    Args:
        module: The user's module.
        step: Runs its training step on a micro-batch.
        batch: That micro-batch, before its step begins.
        device: Where steps run, and with them what lies outside of the network.
        caught: Makes a context in which calls of the network come to `answer` while this is running.

    Attributes:
        block: What was found, as a block of the last stage; None before, and where the step cannot be measured.
        running: Whether the network's call is to be answered by `answer`.
    """

    def __init__(
        self,
        module: nn.Module,
        step: Callable[[], StepResult],
        batch: Any,
        device: torch.device,
        caught: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._module, self._step, self._device, self._caught = module, step, device, caught
        self._contents = BatchContents(batch)
        self._inputs = list(tensors_in(batch))  # also those that the step takes out of the batch
        self._output: Any = None
        self._beside: list[Tensor] = []  # parameters and buffers that the network does not use
        self._begun: tuple[list[Tensor], float] | None = None
        self._saved: dict[int, int] = {}
        self._watch = ExitStack()
        self.block: Block | None = None
        self.running = False

    def measure(self, traced: Traced, output: Any) -> None:
        """Runs the step.

        Args:
            traced: The network's forward; what it does not use comes to the device.
            output: What it returned.
        """
        used = used_tensors(traced)
        self._beside = [t for t in (*self._module.parameters(), *self._module.buffers()) if id(t) not in used]
        for tensor in self._beside:
            if tensor.device != self._device:
                move(tensor, self._device)
        self._output = output
        present = self._contents.now()  # the step that waits for the network's output has begun already
        begin = time.perf_counter()
        try:
            for count in range(_PASSES):
                if count > 1 and time.perf_counter() - begin > _SECONDS:
                    break
                self._contents.restore()
                with preserve_state(self._module), containers_kept(self._module), self._caught():
                    found = self._once(looks=count == 0)
                if found is None:
                    return
                self.block = found if self.block is None else _quicker(self.block, found)
        except Exception:  # which the step itself is about to raise, if it is no matter of measuring
            self.block = None
        finally:
            self._output = self._begun = None
            present.restore()

    def answer(self) -> Any:
        """The network's output, where it is called.

        Raises:
            StepError: If it is called a second time, which the pipeline itself will tell.
        """
        if self._begun is not None:
            raise StepError("The network is called twice.")
        leaves: list[Tensor] = []

        def leaf(tensor: Tensor) -> Tensor:
            made = tensor.detach().to(self._device).requires_grad_(tensor.requires_grad)
            leaves.append(made)
            return made

        made = map_tensors(leaf, self._output)
        known = {_place(tensor) for tensor in (*leaves, *self._inputs, *self._module.parameters())}
        self._saved = {}
        self._watch.enter_context(saved_tensors_hooks(partial(self._note, known), _same))
        self._begun = leaves, now(self._device)
        return made

    def _note(self, known: set[int], tensor: Tensor) -> Tensor:
        if (place := _place(tensor)) not in known:
            self._saved[place] = tensor.untyped_storage().nbytes()
        return tensor

    def _once(self, *, looks: bool) -> Block | None:
        """One pass; None if the step does not call the network."""
        self.running = True
        try:
            with self._watch:
                result = self._step()
        finally:
            self.running = False
        if self._begun is None:
            return None
        leaves, begin = self._begun
        forward, loss = now(self._device) - begin, result.loss
        self._begun = None
        trained = sum(tensor.nbytes for tensor in self._beside if tensor.requires_grad)
        found = Block(
            name="",
            forward=forward,
            parameters=sum(tensor.nbytes for tensor in self._beside),
            trained=trained,
            saved=sum(self._saved.values()),
        )
        if loss is None or loss.grad_fn is None:
            return found
        wanted = [tensor for tensor in (*leaves, *self._module.parameters()) if tensor.requires_grad]
        begin = now(self._device)
        torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=looks)
        backward, transient = now(self._device) - begin, 0
        if looks:
            again = partial(torch.autograd.grad, loss, wanted, allow_unused=True)
            transient = max(0, moment(again, [loss, *wanted]) - trained)  # the gradients stay
        return replace(found, backward=backward, transient=transient)


def _quicker(one: Block, other: Block) -> Block:
    forward, backward = min(one.forward, other.forward), min(one.backward, other.backward)
    return replace(one, forward=forward, backward=backward)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def containers_kept(module: nn.Module) -> Iterator[None]:
    """Lists, dictionaries and sets in the attributes of modules have afterwards what they had before.

    Example:
        >>> module = nn.Identity()
        >>> module.seen = [1]
        >>> with containers_kept(module):
        ...     module.seen.append(2)
        >>> module.seen
        [1]
    """
    held: Sequence[Any] = [
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if type(value) in _CONTAINERS and not name.startswith("_")
    ]
    before = [value.copy() for value in held]
    try:
        yield
    finally:
        for value, was in zip(held, before, strict=True):
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(was)
