"""Out-of-memory errors in manual optimisation, where a step cannot be repeated."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.parallel.step_protocols import StepResult
from equipoise.trainer.recovery.captured_error import CapturedError, raise_with_advice
from equipoise.trainer.recovery.micro_batching import MicroBatcher

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["refuse_to_repeat"]

_REFUSAL = (
    "The module optimises by hand (automatic_optimization=False): its step may have changed parameters already, so it"
    " cannot be done again. A smaller batch_size, precision='bf16-mixed' or activation checkpointing would help."
)


def refuse_to_repeat(context: "RunContext", run: Callable[..., StepResult]) -> Callable[..., StepResult]:
    """Return a function that runs a training step, and raises an out-of-memory error with advice."""
    micro_batcher = MicroBatcher(context, lambda parts, is_last: StepResult(None, None, None))

    def run_once(step: Any, parts: Sequence[Any], last: bool) -> StepResult:
        try:
            return run(step, parts, last)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            captured = CapturedError.of(error)
        event = micro_batcher.event(captured, step.phase, step.batch_idx, parts, 1, _REFUSAL)
        micro_batcher.ask(event)
        return raise_with_advice(captured, event)

    return run_once
