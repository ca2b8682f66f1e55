"""A step of the user's module, on the module or on its replicas.

A strategy that cuts a batch runs the step on each part with `run_on`, in whatever thread, and puts the results together
with `merge`: the losses by weight, the outputs in the order of the data, what was logged by its own reduction. So a
step in parts comes to what the step on the whole batch comes to.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from equipoise.interop.lightning.self_log import CURRENT_HOOK, LogOptions
from equipoise.parallel.batches.gathering import PartialOutputs
from equipoise.parallel.batches.weighting import Weight, weighted_mean
from equipoise.parallel.step_protocols import Around, StepResult
from equipoise.trainer.diagnostics.device_mismatch import EXPLAINED, explain_device_mismatch
from equipoise.trainer.logging.collection import Logged
from equipoise.trainer.logging.entry import default_dtype, reduction_name
from equipoise.trainer.logging.logs import Logs

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["ModuleStep"]

T = TypeVar("T")


class ModuleStep:
    """A step of the user's module.

    Args:
        context: The run.
        name: The method's name, such as "training_step".

    Attributes:
        indices: The batch's index and, where there are several loaders, the loader's.
    """

    def __init__(self, context: "RunContext", name: str) -> None:
        self.module, self.method = context.module, context.hooks.bind_step(name)
        self.forward_context = context.precision.forward_context
        self.indices: tuple[int, ...] = (0,)
        self._name, self._hooks, self._logs = name, context.hooks, context.logs
        self._around: Around | None = None
        # True if the method is called as it is: without a context of the precision or a function of the strategy.
        self.is_plain = self.forward_context is None
        self.in_micro_batches = False  # of a batch that does not fit: outputs are put together once, at the end
        self._replicas: dict[nn.Module, Callable[..., Any]] = {}

    def run_inside(self, around: Around) -> None:
        """Run the method on whole batches inside a function of the strategy; see `TrainingStep`."""
        self._around = around
        self.is_plain = False

    def run(self, part: Any) -> Any:
        """Run the method on a batch, inside the function of the strategy if there is one."""
        if self._around is None:
            return self._run(part)
        return self._around(lambda: self._run(part), part)

    def _run(self, part: Any) -> Any:
        """Run the method on a batch."""
        try:
            if self.forward_context is None:
                return self.method(part, *self.indices)
            with self.forward_context():
                return self.method(part, *self.indices)
        except EXPLAINED as error:
            explain_device_mismatch(error, self.module, part)
            raise

    def finished(self, outputs: PartialOutputs) -> Any:
        """The outputs of all parts of a batch, as they are handed on."""
        return outputs

    def run_on(self, replica: nn.Module, part: Any, size: int) -> StepResult:
        """Runs the method of a replica on one part of a batch; what it logs stays with the result.

        Args:
            replica: The module, or a copy of it.
            part: The part.
            size: Its number of samples.
        """
        method = self._replicas.get(replica)
        if method is None:
            if len(self._replicas) > 32:
                self._replicas.clear()  # of copies that were made anew since
            method = self._replicas[replica] = self._hooks.bind_step(self._name, replica)  # type: ignore[arg-type]

        def compute() -> Any:
            if self.forward_context is None:
                return method(part, *self.indices)
            with self.forward_context():
                return method(part, *self.indices)

        try:
            out, logged = self.capture_logs(compute)
        except EXPLAINED as error:
            explain_device_mismatch(error, replica, part)
            raise
        return self.result(out, size, logged)

    @contextmanager
    def hook_scope(self) -> Iterator[None]:
        """While runs of the method lie in one another: what is logged is logged in it, whichever has ended first."""
        state, current = vars(self.module), CURRENT_HOOK
        outer, state[current] = state.get(current), self._name
        try:
            yield
        finally:
            state[current] = outer

    def capture_logs(self, function: Callable[[], T]) -> tuple[T, Sequence[Logged]]:
        """Runs a function; returns its answer, and what it logged."""
        outer = self._logs.captures.begin()
        try:
            answer = function()
        finally:
            logged = self._logs.captures.end(outer)
        return answer, logged

    def log_together(
        self,
        parts: Sequence[Sequence[Logged]],
        weights: Sequence[Weight],
        device: torch.device,
        *,
        original: Callable[[Metric], Metric],
    ) -> None:
        """Logs once what the parts of a batch logged apart."""
        log_together(self._logs, parts, weights, device, original)

    def result(self, out: Any, size: int, logged: Sequence[Logged]) -> StepResult:
        """What a step on a part came to."""
        return StepResult(None, size, out, logged)

    def merge(
        self,
        results: Sequence[StepResult],
        sizes: Sequence[int],
        device: torch.device,
        *,
        dim: int = 0,
        original: Callable[[Metric], Metric],
    ) -> StepResult:
        """Puts the results of all parts together; see `strategies.steps.PartwiseStep`."""
        weights: list[Weight] = [1 if result.weight is None else result.weight for result in results]
        loss, total = weighted_mean([result.loss for result in results], weights, device)
        log_together(self._logs, [result.logged for result in results], weights, device, original)
        outputs = PartialOutputs([result.outputs for result in results], sizes, device, dim, weights)
        outputs.check()
        return StepResult(loss, total, outputs)


def log_together(
    logs: Logs,
    parts: Sequence[Sequence[Logged]],
    weights: Sequence[Weight],
    device: torch.device,
    original: Callable[[Metric], Metric],
) -> None:
    """Logs each value of a batch once: means by weight, others by their own reduction, metrics as the module's own.

    Args:
        logs: Where to.
        parts: What each part logged. Parts known to weigh nothing are left out.
        weights: The weights of the parts.
        device: Where values are gathered.
        original: The module's metric of which another is a copy.
    """
    together: dict[tuple[str | None, str, int], list[tuple[Logged, Weight]]] = {}
    for part, weight in zip(parts, weights, strict=True):
        seen: Counter[tuple[str | None, str]] = Counter()
        for value in part if isinstance(weight, Tensor) or weight else ():
            key = (value.hook, value.name)
            together.setdefault((*key, seen[key]), []).append((value, weight))
            seen[key] += 1
    for (hook, name, _), values in together.items():
        first = values[0][0]
        if isinstance(first.value, Metric):
            logs.add(hook, name, original(first.value), first.arguments, first.batch_size)
        elif isinstance(first.value, (Tensor, int, float)):
            sizes = [value.batch_size for value, _ in values if value.batch_size is not None]
            logs.add(hook, name, _reduced(values, device), first.arguments, sum(sizes) if sizes else None)
        else:
            logs.add(hook, name, first.value, first.arguments, first.batch_size)  # which says what is wrong with it


def _reduced(values: list[tuple[Logged, Weight]], device: torch.device) -> Tensor:
    """One value of several parts."""
    tensors = [
        (value.value if isinstance(value.value, Tensor) else torch.tensor(value.value, dtype=default_dtype())).to(
            device
        )
        for value, _ in values
    ]
    reduction = reduction_name(LogOptions(*values[0][0].arguments).reduce_fx)
    if reduction == "mean":
        weights = [weight if value.batch_size is None else value.batch_size for value, weight in values]
        mean, _ = weighted_mean(tensors, weights, device)
        return tensors[0] if mean is None else mean
    stacked = torch.stack(tensors)
    return stacked.sum(0) if reduction == "sum" else stacked.amin(0) if reduction == "min" else stacked.amax(0)
