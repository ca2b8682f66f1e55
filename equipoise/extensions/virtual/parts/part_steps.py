"""The steps of the virtual devices of a process, one after another, and what all processes make of them."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.extensions.virtual.parts.evaluation_rounds import logged_on_cpu
from equipoise.extensions.virtual.parts.gradient_tree import (
    Gradients,
    GradientTree,
    added,
    give_gradients,
    take_gradients,
)
from equipoise.extensions.virtual.parts.metric_exchange import MetricExchange
from equipoise.extensions.virtual.parts.part_attributes import PartAttributes
from equipoise.extensions.virtual.parts.part_batches import Part, seed_generators
from equipoise.extensions.virtual.parts.part_modules import PartModules
from equipoise.extensions.virtual.parts.refusals import (
    checking_part,
    explained_sizes,
    hiding_gradients,
    is_other_option,
)
from equipoise.interop.metrics import MetricState
from equipoise.parallel.batches.sampling import seed_of_order
from equipoise.parallel.batches.weighting import Weight, weighted_mean
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.snapshot.buffers import Buffers
from equipoise.parallel.snapshot.random_state import isolated
from equipoise.parallel.step_protocols import NO_RESULT, StepResult, TrainingStep

__all__ = ["PartSteps"]


class _PartReport(NamedTuple):
    """Results of a part that the other processes need to know.

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
        modules: The module on each device of this process.
        size_of: The module's own function that returns the number of samples of a batch; None if it has none.
        weights: Receives the weights of the parts of the present window, of all processes, in their order.
        count: The number of parts of a step.
        ranges: The first part of each process and the part after its last one, by rank.
        processes: The processes.
        metrics: The metrics of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        modules: PartModules,
        size_of: Callable[[Any], int | None] | None,
        weights: list[int | float],
        count: int,
        ranges: Sequence[tuple[int, int]],
        processes: Processes,
        metrics: MetricExchange,
    ) -> None:
        self._weights = weights
        self._module = module
        self._modules = modules
        self._size_of = size_of
        self._ranges = ranges
        self._first, self._end = ranges[processes.rank]
        self._processes = processes
        self._device = modules.devices[0]
        self._metrics = metrics
        self._count = count
        self._tree = GradientTree(count, processes)
        # In the first step of a run all values are compared: that a step changes them by `data`, torch does not count.
        self._is_first_step = True
        # Whether each parameter has a gradient where the step begins.
        self._have_gradients: list[bool] = []

    def run(self, step: TrainingStep, parts: Sequence[Part]) -> StepResult:
        """Compute the parts of a batch. The gradients of the whole step are added to those of the window.

        Args:
            step: The user's training step.
            parts: The parts of this process; it may have fewer than virtual devices.

        Returns:
            The mean loss of the whole step, and what the step of this process's first part returned.
        """
        # 1. Gradients of earlier batches of the window are put aside.
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        earlier: Gradients = [None] * len(parameters)
        self._have_gradients = [parameter.grad is not None for parameter in parameters]
        # The first backward of a window zeroes the gradients of the last one.
        weights_before = [] if step.begins_window else list(self._weights)
        if not step.begins_window:
            earlier = [parameter.grad for parameter in parameters]
            give_gradients(parameters, [None] * len(parameters))

        # 2. The parts of this process; then one exchange with the others.
        buffers = Buffers(self._module)
        buffers.mark()
        self._modules.begin_step()
        self._metrics.begin()
        try:
            attributes = PartAttributes(self._module)
            outputs, reports = self._run_parts(step, parts, parameters, buffers, attributes)
            exchanged = self._processes.gather_objects((self._tree.forms(), reports, attributes.end_step()))
            all_forms = []
            all_reports = []
            for forms, reports_of_process, _ in exchanged:
                all_forms.append(forms)
                all_reports.extend(reports_of_process)
            if self._processes.rank:
                attributes.receive(exchanged[0][2], self._device)
            total = self._tree.total(parameters, all_forms)
            result = self._merge(step, outputs, all_reports, weights_before)
        except BaseException:
            # A checkpoint after an error holds the state before the batch.
            self._metrics.restore()
            buffers.restore()
            self._tree.clear()
            give_gradients(parameters, earlier)
            raise
        if self._processes.world_size > 1:
            copy_from_first(self._module.buffers())
        self._is_first_step = False

        # 3. The gradients of the step are added to the earlier ones.
        give_gradients(parameters, added(earlier, total))
        return result

    def _run_parts(
        self,
        step: TrainingStep,
        parts: Sequence[Part],
        parameters: Sequence[nn.Parameter],
        buffers: Buffers,
        attributes: PartAttributes,
    ) -> tuple[Any, list[_PartReport]]:
        """Compute the parts of this process, and put their gradients into the tree.

        Returns:
            What the step of the first part returned, and what the other processes need to know of each part.
        """
        after_first_part = buffers
        outputs: Any = None
        reports: list[_PartReport] = []
        groups = self._groups_of_optimizers()
        if not parts:
            # Others have a batch in this step, and the first step fixes the weight to which others are relative.
            step.backward(NO_RESULT)
        with isolated():
            for number in range(self._first, self._end):
                index = number - self._first
                if index >= len(parts):
                    self._tree.add(number, [None] * len(parameters))
                    continue
                # 1. The part, and its gradients. Its weight is relative to that of the first part.
                result, size, gradients = self._compute(step, number, parts[index], parameters, is_first=not index)
                reports.append(self._report_of(result, size, parts[index].place))
                if not index:
                    outputs = result.outputs

                # 2. Buffers and attributes are those of the first part, and each part begins with the same.
                self._tree.add(number, gradients)
                attributes.end_part(is_first=not index)
                if number == 0:
                    after_first_part = self._buffers_like(buffers)
                buffers.restore()
        after_first_part.restore()
        self._check_groups(groups)
        return outputs, reports

    def _groups_of_optimizers(self) -> list[dict[str, Any]]:
        """Return a copy of each group of the optimisers, such as their learning rates."""
        groups: list[dict[str, Any]] = []
        for optimizer in getattr(getattr(self._module, "trainer", None), "optimizers", ()):
            groups += map(dict, optimizer.param_groups)
        return groups

    def _check_groups(self, before: list[dict[str, Any]]) -> None:
        """Refuse a step that changes a group, as it does so once for each part of its process."""
        for present, values in zip(self._groups_of_optimizers(), before, strict=False):
            for name, value in present.items():
                if is_other_option(value, values.get(name)):
                    raise StepError(
                        f"`training_step` changes {name!r} of an optimiser, but under strategy='virtual' a process runs"
                        " it once for each of its virtual devices. Change it in a hook, such as `on_train_batch_end`."
                    )

    def _compute(
        self,
        step: TrainingStep,
        number: int,
        part: Part,
        parameters: Sequence[nn.Parameter],
        *,
        is_first: bool,
    ) -> tuple[StepResult, int, Gradients]:
        """Compute a part with random numbers of its own. Return its result, its number of samples and its gradients."""
        seed_generators(seed_of_order(), "part", getattr(self._module, "current_epoch", 0), step.batch_idx, number)
        size = self._weight_of(part)
        with self._modules.computing(part.place) as module, explained_sizes(part.size, number, self._count):
            result = self._run_part(step, module, part.batch, size, parameters, is_first=is_first)
        return result, size, take_gradients(parameters)

    def _buffers_like(self, before: Buffers) -> Buffers:
        """Return the present buffers, of which other processes have copies of the same shapes.

        Raises:
            StepError: If a buffer has changed its shape.
        """
        present = Buffers(self._module)
        present.mark()
        if present.shapes() != before.shapes():
            raise StepError(
                "`training_step` gives a buffer another shape, or registers one, but under strategy='virtual' all"
                " processes receive the buffers of the first part. Give buffers their shapes in the constructor, or"
                " take strategy='ddp'."
            )
        return present

    def _weight_of(self, part: Part) -> int:
        """Return the number of samples of a part, by which it weighs."""
        if self._size_of is None:
            return part.size
        return self._size_of(part.batch) or 0

    def _run_part(
        self,
        step: TrainingStep,
        module: nn.Module,
        batch: Any,
        size: int,
        parameters: Sequence[nn.Parameter],
        *,
        is_first: bool,
    ) -> StepResult:
        """Run the step and the backward of a part with the module of its device."""
        step.begin_micro_batch(size, size)
        hiding = hiding_gradients(parameters, self._have_gradients, begins_window=step.begins_window)
        checking = checking_part(self._module, "`training_step`", contents=self._is_first_step)
        with checking, hiding:
            result = step.run_on(module, batch, size)
        # Numbers are divided alike in all processes, tensors on a device are not.
        result = result._replace(weight=_number(result.weight or 0))
        # The first backward of all begins with the weight of rank 0, which the others receive.
        with nullcontext() if is_first else checking_part(self._module, "The backward"):
            # Hooks of the backward log for each part, too.
            _, logged = step.capture_logs(partial(step.backward, result))
        return result._replace(logged=[*result.logged, *logged])

    def _report_of(self, result: StepResult, size: int, place: int) -> _PartReport:
        loss = None if result.loss is None else result.loss.detach().cpu()
        logged = logged_on_cpu(self._metrics.named(result.logged), size)
        return _PartReport(loss, _number(result.weight or 0), logged, self._metrics.take(place))

    def _merge(
        self,
        step: TrainingStep,
        outputs: Any,
        reports: list[_PartReport],
        weights_before: list[int | float],
    ) -> StepResult:
        """Return the result of the whole step, and log what its parts logged, the same in all processes."""
        weights = [report.weight for report in reports]
        self._metrics.merge([report.metrics for report in reports], weights)
        logged = [self._metrics.found(report.logged) for report in reports]
        step.log_together(logged, weights, self._device, original=_itself)
        loss, total = weighted_mean([report.loss for report in reports], weights, self._device)
        # The sum of a window is that of all its parts, in their order.
        self._weights[:] = weights_before + weights
        return StepResult(loss, total, outputs)


def _number(weight: Weight) -> int | float:
    return weight.item() if isinstance(weight, Tensor) else weight


def _itself(metric: Any) -> Any:
    return metric
