"""The steps of the virtual devices of a process, one after another, and what all processes make of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.virtual.evaluation_rounds import logged_on_cpu
from equipoise.extensions.virtual.gradient_tree import GradientTree
from equipoise.extensions.virtual.metric_exchange import MetricExchange
from equipoise.extensions.virtual.part_batches import seed_generators
from equipoise.interop.distributed.processes import collective_count
from equipoise.interop.metrics import MetricState
from equipoise.parallel.batches.sampling import seed_of_order
from equipoise.parallel.batches.shares import even_sizes
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.batches.weighting import Weight, weighted_mean
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.snapshot.random_state import isolated
from equipoise.parallel.step_protocols import StepResult, TrainingStep

__all__ = ["PartSteps"]


class _PartReport(NamedTuple):
    """What the other processes need to know of a part.

    Attributes:
        loss: The loss, on the CPU; None if the part has none.
        weight: Its weight in the step.
        logged: The values that the part logged, on the CPU, with names in the place of metrics.
        metrics: The states of the metrics that the part has updated.
    """

    loss: Tensor | None
    weight: int | float
    logged: list[Any]
    metrics: list[MetricState]


class PartSteps:
    """Computes the parts of each step that belong to this process, and adds the gradients of all.

    Args:
        module: The user's module.
        splitter: Divides batches of the module.
        weights: Receives the weights of the parts of the present window, of all processes, in their order.
        count: The number of parts of a step.
        ranges: The first part of each process and the part after its last one, by rank.
        processes: The processes.
        device: Where this process computes.
        metrics: The metrics of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        splitter: Splitter,
        weights: list[int | float],
        count: int,
        ranges: Sequence[tuple[int, int]],
        processes: Processes,
        device: torch.device,
        metrics: MetricExchange,
    ) -> None:
        self._weights = weights
        self._module = module
        self._first, self._end = ranges[processes.rank]
        self._processes = processes
        self._device = device
        self._metrics = metrics
        self._splitter = splitter
        self._tree = GradientTree(count, ranges, processes)

    def divide(self, batch: Any) -> Sequence[Any]:
        """Return the parts of a batch of this process.

        Parts of a step differ by one sample at most, larger ones first; so do those of each process.
        """
        size = self._splitter.size_to_cut(batch)
        sizes = [size_of_part for size_of_part in even_sizes(size, self._end - self._first) if size_of_part]
        if len(sizes) <= 1:
            return [batch]
        return self._splitter.parts(batch, sizes)

    def run(self, step: TrainingStep, parts: Sequence[Any]) -> StepResult:
        """Compute the parts of a batch. The gradients of the whole step are added to those of the window.

        Args:
            step: The user's training step.
            parts: The parts of this process; it may have fewer than virtual devices.
        """
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        # 1. Gradients of earlier batches of the window are put aside.
        earlier: list[Tensor | None] = [None] * len(parameters)
        if step.begins_window:
            # The first backward zeroes the gradients of the last window.
            self._weights.clear()
        else:
            for index, parameter in enumerate(parameters):
                earlier[index] = parameter.grad
                parameter.grad = None

        # 2. The parts of this process; then one exchange with the others.
        self._metrics.begin()
        try:
            results, sizes, reports = self._run_parts(step, parts, parameters)
        except BaseException:
            self._metrics.restore()
            raise
        exchanged = self._processes.gather_objects((self._tree.masks(), reports))
        total = self._tree.total(parameters, [masks for masks, _ in exchanged])
        if self._processes.world_size > 1:
            copy_from_first(self._module.buffers())

        # 3. The gradients of the step are added to the earlier ones.
        for parameter, before, gradient in zip(parameters, earlier, total, strict=True):
            if before is not None and gradient is not None:
                gradient = before.add_(gradient)
            parameter.grad = before if gradient is None else gradient
        return self._merge(step, results, sizes, [report for _, of_process in exchanged for report in of_process])

    def _run_parts(
        self, step: TrainingStep, parts: Sequence[Any], parameters: Sequence[nn.Parameter]
    ) -> tuple[list[StepResult], list[int], list[_PartReport]]:
        """Compute the parts of this process, and put their gradients into the tree.

        Returns:
            The result of each part, its size, and what the other processes need to know of it.
        """
        buffers = list(self._module.buffers())
        before = _clones(buffers)
        after_first_part = before
        results: list[StepResult] = []
        sizes: list[int] = []
        reports: list[_PartReport] = []
        seed = seed_of_order()
        epoch = getattr(self._module, "current_epoch", 0)
        with isolated():
            for number in range(self._first, self._end):
                index = number - self._first
                if index >= len(parts):
                    self._tree.add(number, [None] * len(parameters))
                    continue
                # 1. The part, with numbers of its own. Its weight is relative to that of the first part.
                seed_generators(seed, "part", epoch, step.batch_idx, number)
                size = self._splitter.size_to_cut(parts[index])
                result = self._run_part(step, parts[index], size)
                results.append(_detached(result))
                sizes.append(size)
                reports.append(self._report_of(result, size))

                # 2. Its gradients. Buffers are those of the first part, and each part begins with the same.
                self._tree.add(number, [parameter.grad for parameter in parameters])
                for parameter in parameters:
                    parameter.grad = None
                if number == 0:
                    after_first_part = _clones(buffers)
                _copy(before, buffers)
        _copy(after_first_part, buffers)
        return results, sizes, reports

    def _run_part(self, step: TrainingStep, part: Any, size: int) -> StepResult:
        """Run the step and the backward of a part."""
        step.begin_micro_batch(size, size)
        if self._processes.world_size == 1:
            result = step.run_on(self._module, part, size)
            step.backward(result)
            return result
        collectives_before = collective_count()
        result = step.run_on(self._module, part, size)
        _check_collectives(collectives_before)
        step.backward(result)
        return result

    def _report_of(self, result: StepResult, size: int) -> _PartReport:
        loss = None if result.loss is None else result.loss.detach().cpu()
        weight = 0 if result.weight is None else _number(result.weight)
        logged = logged_on_cpu(self._metrics.named(result.logged), size)
        return _PartReport(loss, weight, logged, self._metrics.take())

    def _merge(
        self, step: TrainingStep, results: list[StepResult], sizes: list[int], reports: list[_PartReport]
    ) -> StepResult:
        """Return the result of the whole step, and log what its parts logged, the same in all processes."""
        weights = [report.weight for report in reports]
        self._weights += weights
        self._metrics.merge([report.metrics for report in reports], weights)
        logged = [self._metrics.found(report.logged) for report in reports]
        step.log_together(logged, weights, self._device, original=_itself)
        loss, total = weighted_mean([report.loss for report in reports], weights, self._device)
        if not results:
            return StepResult(loss, total, None)
        without_logs = [result._replace(logged=()) for result in results]
        merged = step.merge(without_logs, sizes, self._device, original=_itself)
        return merged._replace(loss=loss, weight=total)


def _check_collectives(before: int) -> None:
    """Refuse a part that exchanges something with other processes, which may have fewer parts.

    Raises:
        StepError: If it does.
    """
    if collective_count() != before:
        raise StepError(
            "`training_step` communicates with other processes, but under strategy='virtual' a process runs it once for"
            " each of its virtual devices, and others have another number of them. Leave the communication out, or take"
            " strategy='ddp'."
        )


def _detached(result: StepResult) -> StepResult:
    """Return a result without its graph."""
    loss = None if result.loss is None else result.loss.detach()
    return result._replace(loss=loss, outputs=loss)


def _number(weight: Weight) -> int | float:
    return weight.item() if isinstance(weight, Tensor) else weight


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _copy(values: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for value, target in zip(values, targets, strict=True):
            target.copy_(value)


def _itself(metric: Any) -> Any:
    return metric
