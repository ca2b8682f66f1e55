"""A step of the user's module, on the module or on its replicas.

A strategy that cuts a batch runs the step on each part with `run_on`, in any thread. Then `merge` combines the results:
the losses by weight, the outputs in the order of the data, logged values by their own reduction. So a step in parts has
the result of the step on the whole batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Metric

from equipoise.interop.lightning.self_log import CURRENT_HOOK
from equipoise.parallel.batches.weighting import Weight, weighted_mean
from equipoise.parallel.step_protocols import Around, PartialOutputs, StepResult
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.logging.collection import Logged
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.optimization.steps.merged_logs import log_merged
from equipoise.trainer.optimization.steps.step_extension import Context, step_extensions
from equipoise.trainer.state.run_state import RunState

__all__ = ["EXPLAINED", "ModuleStep", "explain_error", "training_forward_context"]

# Errors whose cause may be tensors on different devices, or an unusual batch.
EXPLAINED = (RuntimeError, TypeError, IndexError, ValueError)

T = TypeVar("T")

# Number of replicas whose methods are kept. Strategies may make replicas anew, and the old ones should be freed.
_MOST_REPLICAS = 32


def explain_error(error: Exception, module: nn.Module, part: Any) -> None:
    """Raise a better error than that of a step, or add notes to it; see `explain_device_mismatch`."""
    # Imported here, as the steps of most runs do not fail. A process that has reached its limit of open files cannot
    # import it. Then the error is raised as it is.
    try:
        from equipoise.trainer.diagnostics.device_mismatch import explain_device_mismatch
    except OSError:
        return
    explain_device_mismatch(error, module, part)


class ModuleStep:
    """A step of the user's module.

    Attributes:
        module: The user's module.
        method: The method, as a hook.
        indices: The number of the batch and, where there are several loaders, the number of the loader.
        is_plain: True if the method is called as it is: without a context of the precision or a function of the
            strategy.
        in_micro_batches: True while a batch is computed in micro-batches after an out-of-memory error.
    """

    def __init__(
        self, module: LightningModule, hooks: Hooks, logs: Logs, name: str, forward_context: Context | None
    ) -> None:
        self.module = module
        self.method = hooks.bind_step(name)
        self.indices: tuple[int, ...] = (0,)
        self.in_micro_batches = False
        self._name = name
        self._hooks = hooks
        self._logs = logs
        self._forward_context = forward_context
        self._around: Around | None = None
        self.is_plain = self._forward_context is None
        self._methods: dict[nn.Module, Callable[..., Any]] = {}

    # The batch

    def begin_batch(self, *indices: int) -> None:
        """Begin a batch.

        Args:
            indices: The number of the batch and, where there are several loaders, the number of the loader.
        """
        self.indices = indices

    def begin_micro_batches(self) -> None:
        """Begin a batch that does not fit into memory. Its outputs are put together once, at the end."""
        self.in_micro_batches = True

    def end_micro_batches(self) -> None:
        """End the batch."""
        self.in_micro_batches = False

    # The method on the whole batch

    def run_inside(self, around: Around) -> None:
        """Run the method on whole batches inside a function of the strategy; see `TrainingStep`."""
        self._around = around
        self.is_plain = False

    def run(self, part: Any) -> Any:
        """Run the method on a batch, inside the function of the strategy if there is one."""
        try:
            # The usual way first: it saves two calls.
            if self.is_plain:
                return self.method(part, *self.indices)
            if self._around is None:
                return self._call(self.method, part)
            return self._around(lambda: self._call(self.method, part), part)
        except EXPLAINED as error:
            explain_error(error, self.module, part)
            raise

    def _call(self, method: Callable[..., Any], part: Any) -> Any:
        if self._forward_context is None:
            return method(part, *self.indices)
        with self._forward_context():
            return method(part, *self.indices)

    # The method on parts of a batch

    def run_on(self, replica: nn.Module, part: Any, size: int) -> StepResult:
        """Run the method of a replica on one part of a batch. Logged values stay with the result."""
        # 1. The method of the replica.
        method = self._methods.get(replica)
        if method is None:
            if len(self._methods) > _MOST_REPLICAS:
                self._methods.clear()
            method = self._hooks.bind_step(self._name, replica)  # type: ignore[arg-type]
            self._methods[replica] = method

        # 2. Its call. The context of the precision is entered in the thread of the replica.
        try:
            output, logged = self.capture_logs(lambda: self._call(method, part))
        except EXPLAINED as error:
            explain_error(error, replica, part)
            raise
        return self.result(output, size, logged)

    @contextmanager
    def hook_scope(self) -> Iterator[None]:
        """Let `self.log` log in this step while nested calls of the method run, in whatever order they end."""
        # Without the methods of nn.Module, which would look for a submodule or parameter.
        attributes = vars(self.module)
        outer_hook = attributes.get(CURRENT_HOOK)
        attributes[CURRENT_HOOK] = self._name
        try:
            yield
        finally:
            attributes[CURRENT_HOOK] = outer_hook

    def batch_size(self) -> int:
        """Return the number of samples of the present batch."""
        return self._logs.batch_size()

    def capture_logs(self, function: Callable[[], T]) -> tuple[T, Sequence[Logged]]:
        """Run a function on one part of a batch. Return its result, and the values that it logged."""
        outer_capture = self._logs.captures.begin()
        try:
            result = function()
        finally:
            logged = self._logs.captures.end(outer_capture)
        return result, logged

    def log_together(
        self,
        parts: Sequence[Sequence[Logged]],
        weights: Sequence[Weight],
        device: torch.device,
        *,
        original: Callable[[Metric], Metric],
    ) -> None:
        """Log once the values that the parts of a batch logged; see `PartwiseStep`."""
        log_merged(self._logs, parts, weights, device, original)

    def result(self, output: Any, size: int, logged: Sequence[Logged]) -> StepResult:
        """Return the result of the method on a part."""
        return StepResult(None, size, output, logged)

    def merge(
        self,
        results: Sequence[StepResult],
        sizes: Sequence[int],
        device: torch.device,
        *,
        dim: int = 0,
        original: Callable[[Metric], Metric],
    ) -> StepResult:
        """Put the results of all parts together; see `PartwiseStep`."""
        # 1. The loss. Evaluation steps have neither losses nor weights.
        weights: list[Weight] = [1 if result.weight is None else result.weight for result in results]
        losses = [result.loss for result in results]
        loss, total_weight = weighted_mean(losses, weights, device)

        # 2. The logged values.
        logged = [result.logged for result in results]
        log_merged(self._logs, logged, weights, device, original)

        # 3. The outputs. They are gathered only if a hook reads them.
        outputs = PartialOutputs([result.outputs for result in results], sizes, device, dim, weights)
        outputs.check()
        return StepResult(loss, total_weight, outputs)

    def finished(self, outputs: PartialOutputs) -> Any:
        """Return the outputs of all parts of a batch in the form in which hooks receive them."""
        return outputs


def training_forward_context(
    state: RunState, module: LightningModule, strategy: Strategy, precision: Precision
) -> Context | None:
    """Return the context of a training step: the precision's, and those of extensions within; None if none."""
    of_extensions = [extension.forward_context(state, module, strategy) for extension in step_extensions(state)]
    contexts = [precision.forward_context, *of_extensions]
    needed = [enter for enter in contexts if enter is not None]
    if len(needed) < 2:
        return needed[0] if needed else None

    @contextmanager
    def all_of_them() -> Iterator[None]:
        with ExitStack() as stack:
            for enter in needed:
                stack.enter_context(enter())
            yield

    return all_of_them
