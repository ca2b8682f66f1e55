"""Recovery from an out-of-memory error: restore the step and run it again in micro-batches.

    window begins       note random generators, buffers, metrics, logs
    batch               compute it, in as many parts as batches of its kind last needed
      out of memory     let go of the failed attempt, ask the callbacks, bring everything back,
                        compute the window anew: its earlier batches as they were, this one in more parts

What a batch computed in parts comes to is what it comes to in one: gradients by weight, logs by their own reduction.
The hooks around a backward fire for each part. Where an error is raised after all, it says what would help.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.interop.torch.modules import versions
from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.parallel.optimizer_parameters import optimizer_parameters
from equipoise.parallel.snapshot.batch_contents import BatchContents
from equipoise.parallel.snapshot.state_snapshot import StepSnapshot
from equipoise.parallel.step_protocols import StepResult
from equipoise.trainer.recovery.captured_error import CapturedError, raise_with_advice
from equipoise.trainer.recovery.micro_batching import Measure, MicroBatcher
from equipoise.trainer.recovery.second_attempt import with_second_attempt

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["EvaluationRecovery", "Recovery", "refuse_by_hand"]

_BY_HAND = (
    "The module optimises by hand (automatic_optimization=False): its step may have changed parameters already, so it"
    " cannot be done again. A smaller batch_size, precision='bf16-mixed' or activation checkpointing would help."
)


@dataclass(slots=True)
class _Batch:
    """A batch of the window."""

    parts: Sequence[Any]
    batch_idx: int
    contents: BatchContents
    count: int = 1
    measured: Measure | None = None


@dataclass
class _Window:
    """The batches of a window that were computed so far."""

    batches: list[_Batch] = field(default_factory=list)
    pending: int = 0  # what was logged before it


class Recovery:
    """Computes gradients like the strategy's `forward_backward`, whatever memory does.

    Args:
        context: The run.
        step: The user's training step.
    """

    def __init__(self, context: "RunContext", step: Any) -> None:
        self.context, self.step, self.window = context, step, step.window
        self.logs, self.strategy = context.logs, context.strategy
        self.strategy.recovery.enable()
        self.rewind = StepSnapshot(context.module, context.strategy.devices)
        self.parts = MicroBatcher(context, self._compute)
        self._open = _Window()
        self._ends = True  # whether the window ends with the present batch
        self._start: tuple[dict[str, Any], list[Tensor | None]] | None = None  # of a window that was begun elsewhere
        self._marked = self._weighed = False
        self._whole = 0  # the samples of a batch that is computed in pieces

    def _compute(self, parts: Sequence[Any], last: bool) -> StepResult:
        ends = last and self._ends and self._running is self._open.batches[-1]
        if self.step.in_micro_batches:
            self.window.micro_batch = (self.parts.size(parts), self._whole)
        return self.strategy.forward_backward(self.step, parts, ends)

    def __call__(self, step: Any, parts: Sequence[Any], last: bool) -> StepResult:
        """Computes the gradients of a batch; see `Strategy.forward_backward`."""
        opened = self._open
        if (fresh := step.batch_idx % self.window.parts == 0) or not self._marked:
            with_second_attempt(self.rewind.mark, self.parts.let_go)
            opened.batches.clear()
            self._marked, self._start = True, None if fresh else self._state()  # or resumed in its midst
            # Where there are several processes, the reference weight is exchanged once, by all of them.
            self._weighed = self.window.has_reference or self.window.sync_reference is not None
        opened.pending = len(self.logs.pending)
        count = self.parts.count(parts) if parts else 1
        self._running = batch = _Batch(parts, step.batch_idx, BatchContents(tuple(parts)), count)
        batch.measured = self.parts.measure(parts)
        opened.batches.append(batch)
        self._ends, begin = last, len(opened.batches) - 1
        step.phase, usual = "forward", count == 1 and bool(parts)
        while True:
            try:  # the shortest way, unless there is more to do
                result = self.strategy.forward_backward(step, parts, last) if usual else self._run(begin)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = CapturedError.of(error)
            begin, usual = 0, False
            self._prepare(failure)
            step.phase = "forward"
        if parts:
            self.parts.good(batch.measured)
        if last:
            opened.batches.clear()
        return result

    def _run(self, begin: int) -> StepResult:
        """Computes the window's batches from one on; earlier ones without logging again."""
        step, batches, result = self.step, self._open.batches, StepResult(None, 0, None)
        current = batches[-1]
        for self._running in batches[begin:]:
            batch = self._running
            step.batch_idx, step.indices = batch.batch_idx, (batch.batch_idx,)
            if batch is current:
                result = self._run_batch(batch)
            else:
                step.capture_logs(lambda batch=batch: self._run_batch(batch))
        return result

    def _run_batch(self, batch: _Batch) -> StepResult:
        if batch.count == 0 and self.strategy.processes.world_size == 1:  # left out, as if its step had returned None
            self.step.backward(nothing := StepResult(None, 0, None))
            return nothing
        if batch.count <= 1:
            return self._compute(batch.parts if batch.count else (), True)
        self.step.weigh = self.step.weigher.of_piece
        self._whole = self.parts.size(batch.parts)
        try:
            return self.parts.run(self.step, batch.parts, batch.count)
        finally:
            self.window.micro_batch = None

    def _prepare(self, failure: CapturedError) -> None:
        """Asks what to do, and brings everything back to how the window found it."""
        batch, step = self._running, self.step
        for each in self._open.batches:
            each.contents.restore()
        refusal = self.strategy.recovery.why_not(training=True, leave_out=False)
        event = self.parts.event(failure, step.phase, batch.batch_idx, batch.parts, batch.count, refusal)
        answer = self.parts.ask(event)
        sent = self._roll_back()
        if answer is None:
            raise_with_advice(failure, event, refusal)
        obstacle = self.strategy.recovery.why_not(training=True, leave_out=not answer.parts)
        if sent and not answer.parts and not obstacle:
            obstacle = (
                "It cannot be left out: others have a part of its gradients. OOMRecovery(policy='split') can cut it."
            )
        if obstacle:
            raise_with_advice(failure, event, obstacle)
        self.strategy.recovery.reduce_share()
        batch.count = answer.parts
        if answer.parts > 1:
            self.parts.failed(batch.parts, answer)
            for each in self._open.batches:
                each.measured = self.parts.measure(each.parts)
        self.parts.let_go()

    def _roll_back(self) -> bool:
        """Brings everything back; returns whether other processes have a part of the gradients."""
        step = self.step
        del self.logs.pending[self._open.pending :]
        with_second_attempt(self.rewind.restore, self.parts.let_go)
        self.window.reset()
        if not self._weighed:  # else the failed attempt's weight would show in the bits of this one
            self.window.forget_reference()
        if self._start is not None:
            state, gradients = self._start
            self.window.load_state_dict(state)
            for parameter, gradient in zip(self._parameters(), gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
        elif not step.begins_window:  # else the gradients are still those that the zeroing is to find
            for parameter in self._parameters():
                parameter.grad = None
        return self.strategy.recovery.discard()

    def _parameters(self) -> list[nn.Parameter]:
        return [p for optimizer in self.context.trainer.optimizers for p in optimizer_parameters(optimizer)]

    def _state(self) -> tuple[dict[str, Any], list[Tensor | None]]:
        """What an earlier run has left of the window: its weights and gradients."""
        gradients = [None if p.grad is None else p.grad.detach().clone() for p in self._parameters()]
        return self.window.state_dict(), gradients

    def finish_gradients(self, window: AccumulationWindow, optimizer: Optimizer) -> bool | None:
        """Weighs the gradients of a window, if it was weighed at all, where one batch in one process makes a window."""
        return self.strategy.finish_gradients(window, optimizer) if window.is_open else None

    def end_window(self) -> None:
        """The optimiser has stepped."""
        self.step.weigh = self.step.usual_weigher
        if self.step.weigh is None:
            self.window.forget_reference()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Steps an optimiser; once more if memory ran out before anything was changed."""
        if closure is None:
            return self._step(self.strategy.optimizer_step, optimizer, **kwargs)
        in_closure = False  # whose own errors are told of already

        def watched() -> Any:
            nonlocal in_closure
            in_closure = True
            answer = closure()
            in_closure = False
            return answer

        try:
            return self.strategy.optimizer_step(optimizer, watched, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if in_closure or not is_out_of_memory(error):
                raise
            failure = CapturedError.of(error)
        # Its gradients come from within it, and it may have changed parameters in between, as LBFGS does.
        return self._raise_in_step(failure, "A step that computes its gradients in a closure is not done again.")

    def surviving(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The same for another way of stepping, such as a scaler's, which takes the optimiser first."""
        return partial(self._step, step)

    def _step(self, step: Callable[..., Any], optimizer: Optimizer, **kwargs: Any) -> Any:
        before = _versions(optimizer)
        try:
            return step(optimizer, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = CapturedError.of(error)
        if _changed(before, _versions(optimizer)):
            self._raise_in_step(failure, "The step had changed something already, so it cannot be done again.")
        event = self.parts.event(failure, "optimizer step", self.step.batch_idx, (), 1)
        answer = self.parts.ask(event)
        if answer is None or not answer.parts:  # a step cannot be left out: the gradients are those of good batches
            raise_with_advice(failure, event)
        if not before[1]:  # its state was just being made
            optimizer.state.clear()
        self.parts.let_go()
        try:
            return step(optimizer, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = CapturedError.of(error)
        return self._raise_in_step(failure, "The step was done once more already.")

    def _raise_in_step(self, failure: CapturedError, refusal: str) -> NoReturn:
        """Raises the error of an optimiser's step that cannot be done again, which the callbacks are told."""
        event = self.parts.event(failure, "optimizer step", self.step.batch_idx, (), 1, refusal)
        self.parts.ask(event)
        raise_with_advice(failure, event)


def _versions(optimizer: Optimizer) -> tuple[list[int] | None, list[int] | None]:
    """How often parameters and the optimiser's state were changed."""
    parameters = versions(optimizer_parameters(optimizer))
    if not optimizer.state:
        return parameters, []
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    return parameters, versions(state)


_Versions = tuple[list[int] | None, list[int] | None]


def _changed(before: _Versions, after: _Versions) -> bool:
    """Whether a step has changed parameters or state, or nobody can tell; state that was just being made is none."""
    if before[0] is None or before[0] != after[0]:
        return True
    return before[1] is None or bool(before[1] and before[1] != after[1])


class EvaluationRecovery:
    """Evaluates batches like the strategy's `evaluate`, whatever memory does; sizes are learned apart from training's.

    Args:
        context: The run.
        name: The stage, such as "val".
    """

    def __init__(self, context: "RunContext", name: str) -> None:
        self.strategy, self.logs = context.strategy, context.logs
        self.strategy.recovery.enable()
        self.rewind = StepSnapshot(context.module, context.strategy.devices)
        self.parts = MicroBatcher(context, self._compute, name)

    def _compute(self, piece: Sequence[Any], last: bool) -> StepResult:
        return StepResult(None, self.parts.size(piece), self.strategy.evaluate(self._step, piece))

    def __call__(self, step: Any, parts: Sequence[Any]) -> Any:
        """The output of an evaluation step; see `Strategy.evaluate`."""
        with_second_attempt(self.rewind.mark, self.parts.let_go)
        contents = BatchContents(tuple(parts))
        measured = self.parts.measure(parts)
        self._step, pending, count = step, len(self.logs.pending), self.parts.count(parts)
        while True:
            try:
                if count <= 1:
                    output = self.strategy.evaluate(step, parts)
                else:
                    output = self.parts.run(step, parts, count).outputs
                self.parts.good(measured)
                return output
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = CapturedError.of(error)
            contents.restore()
            refusal = self.strategy.recovery.why_not(training=False, leave_out=False)
            event = self.parts.event(failure, "evaluation", step.indices[0], parts, count, refusal)
            answer = self.parts.ask(event)
            del self.logs.pending[pending:]
            with_second_attempt(self.rewind.restore, self.parts.let_go)
            if refusal or answer is None or not answer.parts:  # what is left out would be missing in the metrics
                raise_with_advice(failure, event, refusal)
            count = answer.parts
            if count > 1:
                self.parts.failed(parts, answer)
                measured = self.parts.measure(parts)
            self.parts.let_go()


def refuse_by_hand(context: "RunContext", run: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """The training step of a module that optimises by hand: nobody can do it again, so an error says what would help.

    Args:
        context: The run.
        run: Runs the step on a batch.
    """
    helper = MicroBatcher(context, lambda piece, last: StepResult(None, None, None))

    def checked(step: Any, parts: Sequence[Any], last: bool) -> StepResult:
        try:
            return run(step, parts, last)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failure = CapturedError.of(error)
        event = helper.event(failure, step.phase, step.batch_idx, parts, 1, _BY_HAND)
        helper.ask(event)
        return raise_with_advice(failure, event)

    return checked
