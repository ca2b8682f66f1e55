"""Steps of manual optimisation: all parts take the same backwards and steps of optimisers, and take them together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from equipoise.errors import StepError
from equipoise.extensions.common.step_thread import StepThread
from equipoise.extensions.virtual.by_hand.batch_copies import packed_parts, unpacked_parts
from equipoise.extensions.virtual.by_hand.part_view import PartView, give_own_buffers
from equipoise.extensions.virtual.by_hand.shared_state import SharedState
from equipoise.extensions.virtual.by_hand.turns import Call, Turns
from equipoise.extensions.virtual.parts.gradient_tree import Gradients, added, give_gradients, take_gradients
from equipoise.extensions.virtual.parts.part_batches import Part, seed_generators
from equipoise.extensions.virtual.parts.part_steps import PartSteps
from equipoise.interop.torch import foreach
from equipoise.parallel.batches.sampling import seed_of_order
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.snapshot.buffers import Buffers
from equipoise.parallel.snapshot.random_state import RandomState, capture
from equipoise.parallel.step_protocols import StepResult, TrainingStep

__all__ = ["ManualSteps"]

_PURPOSE = "A process without samples in this step receives the batch of the first part, in manual optimisation."


class ManualSteps(PartSteps):
    """Parts of a step that run backwards and step optimisers by hand.

    One part of a process runs at a time. At a backward, a step of an optimiser or a scheduler, or `clip_gradients`, it
    waits for all others. Then it is done once, with the weighted mean of the gradients of all parts.

    Args:
        arguments: See `PartSteps`.
    """

    # The present step, its parts in turn, how each of them has ended, what parts and hooks have logged, what the first
    # part of this process has returned, and the generators of the run.
    _step: TrainingStep
    _turns: Turns
    _endings: dict[int, str]
    _reports: list[Any]
    _logged: list[Any]
    _outputs: Any
    _numbers_of_run: RandomState

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._threads: list[StepThread] = []
        self._parameters = list(self._module.parameters())
        # The numbers of the parts of this process in the present batch, and their factors in the mean.
        self._numbers: list[int] = []
        self._factors: list[float] = []
        self._runs_backward = False

    def close(self) -> None:
        """End the threads of parts."""
        for thread in self._threads:
            thread.close()

    def run(self, step: TrainingStep, parts: Sequence[Part]) -> StepResult:
        """Run the step of all parts; see `PartSteps`."""
        module: Any = self._module
        self._step = step
        parts = self._weighed(parts)
        buffers = Buffers(self._module)
        buffers.mark()
        self._metrics.begin()
        self._optimizers = _listed(module.optimizers(use_pl_optimizer=False))
        before = PartView(self._module, self._parameters, ())
        before.leave()
        self._numbers_of_run = before.numbers
        try:
            with self._calls_meet():
                self._run_in_turn(parts)
            result = self._merge(step, self._outputs, self._reports, [])
            self._outputs = None
            self._buffers_like(buffers)
        except BaseException:
            self._metrics.restore()
            self._tree.clear()
            before.enter()
            buffers.restore()
            raise
        self._is_first_step = False
        self._numbers_of_run.restore()
        if self._processes.world_size > 1:
            copy_from_first(self._module.buffers())
        # Gradients that remain belong to a checkpoint, as those of an open window do.
        if all(parameter.grad is None for parameter in self._parameters):
            self._weights.clear()
        return StepResult(None, None, result.outputs)

    def _weighed(self, parts: Sequence[Part]) -> Sequence[Part]:
        """Note the factor of each part in the mean. Return the parts that this process computes, at least one."""
        sizes = self._processes.gather_objects([self._weight_of(part) for part in parts])
        weights = [size for of_process in sizes for size in of_process]
        total = sum(weights) or 1
        self._numbers = [self._first + index for index in range(len(parts))]
        self._factors = [weights[number] / total for number in self._numbers]
        if all(sizes):
            return parts
        # A process without samples computes the first part, too, and adds nothing.
        packed = b""
        if self._first == 0:
            packed = packed_parts({0: parts[0]}, _PURPOSE, "set `drop_last=True`")
        packed = self._processes.broadcast(packed)
        if parts:
            return parts
        received = unpacked_parts(packed, [self._device])
        return [received[0]]

    def _run_in_turn(self, parts: Sequence[Part]) -> None:
        """Run the parts of this process, and receive what those of all report."""
        self._endings = {}
        self._reports = []
        self._logged = []
        shared = SharedState(self._parameters, self._optimizers)
        shared.share()
        views: list[PartView] = []
        steps = []
        # Without samples, this process does what the first part does.
        numbers = self._numbers or [0]
        for number, part in zip(numbers, parts, strict=True):
            # Each part but the first changes buffers of its own, and each has metrics as new.
            if views:
                give_own_buffers(self._module)
            self._metrics.take()
            view = PartView(self._module, self._parameters, self._optimizers, contents=self._is_first_step)
            view.leave()
            views.append(view)
            steps.append(partial(self._run_whole, number, part))
        # The first part runs in this thread.
        while len(self._threads) < self._end - self._first - 1:
            thread = StepThread(f"equipoise-part-{len(self._threads) + 1}")
            self._threads.append(thread)
        threads = self._threads[: len(parts) - 1]
        self._turns = Turns(threads, views, shared, self._meeting)
        try:
            self._turns.run(steps)
        except BaseException:
            # Those that a part has set alone are not those of the run.
            shared.give_options()
            raise
        finally:
            # What parts have seen, such as graphs, is not kept.
            del self._turns

    def _run_whole(self, number: int, part: Part) -> None:
        """Run the step of a part, from its beginning to its end."""
        seed_generators(seed_of_order(), "part", self._epoch(), self._step.batch_idx, number)
        size = self._weight_of(part)
        result = self._step.run_on(self._module, part.batch, size)
        index = self._turns.running
        self._endings[index] = f"ends its `training_step`{self._turns.shared.changes()}"
        if index == 0:
            self._outputs = result.outputs
        if number == 0:
            # Hooks log the same in all processes.
            result = result._replace(logged=[*result.logged, *self._logged])
        if self._numbers:
            self._reports.append(self._report_of(result, size, part.place))

    # Calls that all parts make together

    @contextmanager
    def _calls_meet(self) -> Iterator[None]:
        """Let calls of the module, of optimisers and of schedulers be made together, in a `with` block."""
        module: Any = self._module
        calls: list[tuple[Any, str, Callable[..., Any]]] = [
            (module, "manual_backward", self._backward),
            (module, "clip_gradients", partial(self._once, "clips gradients")),
        ]
        for optimizers in (_listed(module.optimizers()), self._optimizers):
            for index, optimizer in enumerate(optimizers):
                step_once = partial(self._optimizer_step, f"steps optimiser {index}")
                calls.append((optimizer, "step", step_once))
        schedulers = _listed(module.lr_schedulers())
        for index, scheduler in enumerate(schedulers):
            step_once = partial(self._once, f"steps scheduler {index}")
            calls.append((scheduler, "step", step_once))
        # Attributes of the objects, which hide the methods.
        before = [vars(owner).get(name) for owner, name, _ in calls]
        handles = []
        try:
            for owner, name, function in calls:
                original = getattr(owner, name)
                vars(owner)[name] = update_wrapper(partial(function, original), original)
            for parameter in self._parameters:
                if parameter.requires_grad:
                    handles.append(self._watch(parameter))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for (owner, name, _), original in zip(calls, before, strict=True):
                vars(owner).pop(name, None)
                if original is not None:
                    vars(owner)[name] = original

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Run the backward of a part; then all have the mean of the gradients of all, added to earlier ones."""
        # 1. The gradients of the part alone.
        if self._turns.is_acting:
            raise StepError(
                "A backward runs within the step of an optimiser, as LBFGS has it, but under strategy='virtual' all"
                " parts have run theirs before. Take another optimiser, or strategy='ddp'."
            )
        earlier = [parameter.grad for parameter in self._parameters]
        none: Gradients = [None] * len(self._parameters)
        give_gradients(self._parameters, none)
        self._runs_backward = True
        try:
            original(*args, **kwargs)
        finally:
            self._runs_backward = False

        # 2. Their share in the mean. The last part of a process stands for parts without samples, too.
        index = self._turns.running
        if self._numbers:
            present = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            foreach.multiply_(present, self._factors[index])
            gradients = take_gradients(self._parameters)
            self._tree.add(self._numbers[index], gradients)
        give_gradients(self._parameters, earlier)
        if index + 1 >= len(self._numbers):
            for number in range(self._first + len(self._numbers), self._end):
                self._tree.add(number, list(none))
        changes = self._turns.shared.changes_of_groups()
        call = Call(f"runs a backward{changes}", self._add_total)
        self._turns.meet(call)

    def _add_total(self, forms: list[Any]) -> None:
        total = self._tree.total(self._parameters, forms)
        earlier = [parameter.grad for parameter in self._parameters]
        give_gradients(self._parameters, added(earlier, total))

    def _watch(self, parameter: Any) -> RemovableHandle:
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self._refuse_other_backward)
        return handle

    def _refuse_other_backward(self, parameter: Tensor) -> None:
        if not self._runs_backward:
            raise StepError(
                "`loss.backward()` computes the gradients of a part alone, but under strategy='virtual' an optimiser's"
                " step takes those of all parts. Call `self.manual_backward(loss)`."
            )

    def _optimizer_step(self, label: str, original: Callable[..., Any], closure: Any = None, **kwargs: Any) -> Any:
        """Step an optimiser once for all parts, whose closures run before, each in its part."""
        if closure is None:
            if not self._turns.is_acting:
                label += self._turns.shared.changes()
            return self._once(label, original, **kwargs)
        if self._turns.is_acting:
            return original(closure=closure, **kwargs)
        with torch.enable_grad():
            loss = closure()
        label += self._turns.shared.changes()
        # The optimiser receives the loss of the first part. If it asks again, the closure's backward is refused.
        losses = [loss]

        def computed() -> Any:
            if losses:
                return losses.pop()
            return closure()

        stepping = partial(original, closure=computed)
        self._once(label, stepping, **kwargs)
        return loss

    def _once(self, label: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function once for all parts, with the arguments of the first, which are those of all."""
        # Hooks of an optimiser's step may clip gradients.
        if self._turns.is_acting:
            return original(*args, **kwargs)
        described = [self._described(argument) for argument in (*args, *kwargs.values())]
        if described:
            text = ", ".join(described)
            label += f" ({text})"
        function = partial(original, *args, **kwargs)
        call = Call(label, lambda _: self._as_run(function))
        return self._turns.meet(call)

    def _as_run(self, function: Callable[[], Any]) -> Any:
        """Call a function that draws the numbers of the run, and logs for all parts together."""
        self._numbers_of_run.restore()
        result, logged = self._step.capture_logs(function)
        self._numbers_of_run = capture()
        self._logged += logged
        return result

    def _described(self, argument: Any) -> str:
        """Return a text that is the same for equal arguments in all processes."""
        if isinstance(argument, Tensor):
            return str(argument.tolist())
        for index, optimizer in enumerate(self._optimizers):
            if optimizer in (argument, getattr(argument, "optimizer", None)):
                return f"optimiser {index}"
        return repr(argument)

    def _meeting(self, calls: Sequence[Call | None]) -> Any:
        """Make a call for all parts, if it is the same in all parts of all processes."""
        labels = []
        for index, call in enumerate(calls):
            if call is None:
                labels.append(self._endings[index])
            else:
                labels.append(call.label)
        # Without samples, this process has run the first part, which another process counts.
        own_labels = labels[: len(self._numbers)]
        gathered = self._processes.gather_objects((own_labels, self._tree.forms(), self._reports))
        of_all = [label for labels_of_process, _, _ in gathered for label in labels_of_process]
        for number, label in enumerate(of_all):
            if label != of_all[0]:
                raise StepError(
                    f"Part {number} of batch {self._step.batch_idx} {label}, where part 0 {of_all[0]}. Under"
                    " strategy='virtual' all parts take the same backwards and steps in the same order. Let what a step"
                    " does depend on `batch_idx` or on values that all parts have, not on their samples."
                )
        call = calls[0]
        if call is not None:
            return call.act([forms for _, forms, _ in gathered])
        self._reports = [report for _, _, reports in gathered for report in reports]
        return None


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]
