"""Recorder of the first steps of a run: losses, gradients, weights, buffers, logged values, of all its processes."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from equipoise.callbacks.callback import Callback
from equipoise.extensions.verification.alike import DrawsAlike, without_coupling
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.snapshot import random_state
from equipoise.strategies.strategy import splitter_of
from equipoise.tree import map_leaves

__all__ = ["Batch", "Recorder", "Step", "Tensors"]

Tensors = dict[str, Tensor]
# The scale of the loss in half precision.
_SCALE = 256.0


class Batch(NamedTuple):
    """A training batch of a process.

    Attributes:
        epoch: Its epoch.
        parts: The parts that the process computes, on the CPU; none where only other processes have a batch.
        sizes: The number of samples of each.
        loss: The mean loss, if there is one.
        logged: The values that are logged after it.
        length: Number of batches of the epoch.
        is_last: Whether the epoch ends with it.
        generators: The random generators before it, in the main process.
    """

    epoch: int
    parts: Sequence[Any]
    sizes: Sequence[int]
    loss: Any
    logged: dict[str, float]
    length: float
    is_last: bool
    generators: random_state.RandomState


class Step(NamedTuple):
    """An optimiser's step, before it changes the weights.

    Attributes:
        batch: Number of its batch, from 0.
        state: Weights and buffers.
        gradients: The gradients of the optimiser's parameters.
    """

    batch: int
    state: Tensors
    gradients: dict[str, Tensor | None]


class Recorder(Callback):
    """Records the first steps of a run, and ends it after them.

    Args:
        count: Number of batches after which an optimiser was stepped.
        alike: Let all samples draw the same numbers, and take batch statistics from the running ones.

    Attributes:
        initial: Weights and buffers at the beginning.
        steps: The optimiser steps.
        final: Weights and buffers at the end.
        batches: The batches of each process, by rank; empty until the run has ended.
        parameters: The names of all parameters, also of those that no optimiser steps.
    """

    fires_without_batch = True

    def __init__(self, count: int, *, alike: bool) -> None:
        self._count = count
        self._alike = alike
        self._stepped: set[int] = set()
        self._local: list[Batch] = []
        self._module: Any = None
        self._names: dict[int, str] = {}
        self._last_state: Tensors = {}
        self.initial: Tensors = {}
        self.steps: list[Step] = []
        self.final: Tensors = {}
        self.batches: list[list[Batch]] = []
        self.parameters: set[str] = set()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note the state with which the run begins."""
        self._module = pl_module
        # Within a step, a strategy in shards gives the module other parameters than the optimiser.
        self._names = {id(parameter): name for name, parameter in pl_module.named_parameters()}
        self.parameters = {name for name, _ in pl_module.named_parameters(remove_duplicate=False)}
        self.initial = self._state(trainer)
        self._last_state = self.initial
        scaler = trainer.precision_in_use.scaler
        if scaler is not None:
            # The usual one begins with overflows, whose steps are left out.
            scaler.load_state_dict({**scaler.state_dict(), "scale": _SCALE})

    def _state(self, trainer: Any) -> Tensors:
        """Return weights and buffers in the main process; all of them call this together."""
        # 1. Strategies in shards gather it.
        state = trainer.strategy.portable.module_state(self._module)
        # 2. Other processes have placeholders.
        if not trainer.is_global_zero:
            return {}
        return {name: on_cpu(value) for name, value in state.items() if isinstance(value, Tensor)}

    def wrap_call(self, trainer: Any, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Record the parts of each batch, and their loss."""
        if not action.endswith(".forward_backward"):
            return function
        splitter = splitter_of(trainer.strategy, trainer.lightning_module)

        def recorded(step: Any, parts: Sequence[Any], last: bool) -> Any:
            generators = random_state.capture()
            # Strategies with several parts in a process give the hooks of the loop the first alone.
            batches = list(map(_batch_of, getattr(parts, "parts", parts)))
            copies = [on_cpu(batch) for batch in batches]
            sizes = [splitter.size(batch) or 1 for batch in batches]
            with self._computing(step.batch_idx):
                result = function(step, parts, last)
            # An optimiser with a closure computes a batch several times.
            if len(self._local) == self._number:
                loss = result.loss
                if loss is None and isinstance(result.outputs, Tensor):
                    loss = result.outputs
                length = trainer.num_training_batches
                is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
                epoch = trainer.current_epoch
                self._local.append(Batch(epoch, copies, sizes, on_cpu(loss), {}, length, is_last, generators))
            return result

        return recorded

    # Number of the present batch, counted over epochs.
    _number = 0

    def _computing(self, batch_idx: int) -> Any:
        """Return the context of a batch's computation."""
        if not self._alike:
            return nullcontext()
        without_coupling(self._module)
        random_state.seeded(batch_idx).restore()
        return DrawsAlike()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note weights and gradients before a step; all processes call this."""
        gradients = trainer.strategy.portable.gradients([optimizer], window_is_open=True)
        by_name: dict[str, Any] = {}
        for parameter, gradient in zip(optimizer_parameters(optimizer), gradients, strict=False):
            name = self._names[id(parameter)]
            by_name[name] = None
            # Those of the main process are compared.
            if trainer.is_global_zero:
                by_name[name] = on_cpu(gradient)
        self.steps.append(Step(self._number, self._state(trainer), by_name))
        self._stepped.add(self._number)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note logged values, and end the run after the last step."""
        values = {}
        for name, value in trainer.callback_metrics.items():
            values[name] = float(value)
        if len(self._local) > self._number:
            self._local[-1] = self._local[-1]._replace(logged=values)
        if trainer.global_step > len(self.steps):
            # The optimiser has stepped in the backward.
            self.steps.append(Step(self._number, self._last_state, {}))
            self._last_state = self._state(trainer)
            self._stepped.add(self._number)
        self._number += 1
        if len(self._stepped) >= self._count:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Note the last state, and gather what all processes have recorded."""
        self.final = self._state(trainer)
        self.batches = trainer.strategy.processes.gather_objects(self._local)
        self._module = None
        self._names = {}
        self._local = []


def _batch_of(part: Any) -> Any:
    """Return the batch of a part, which a strategy may give together with its size."""
    fields = getattr(type(part), "_fields", ())
    if fields[:2] == ("batch", "size"):
        return part.batch
    return part


def on_cpu(value: Any) -> Any:
    """Return a nested value with copies of its tensors on the CPU."""
    return map_leaves(_leaf_on_cpu, value)


def _leaf_on_cpu(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to("cpu", copy=True)
