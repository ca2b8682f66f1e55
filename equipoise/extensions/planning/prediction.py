"""`predict_memory`: the peak of a step with any batch size, before the first step."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import psutil
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.extensions.common.device_loads import PlannedPart
from equipoise.extensions.planning.description.settings import StepSettings, planned_callbacks
from equipoise.extensions.planning.interop import PLAN
from equipoise.extensions.planning.peaks.memory_prediction import MemoryPrediction
from equipoise.extensions.planning.peaks.recorded_step import RecordedStep
from equipoise.extensions.planning.tracing.batches import size_of_batch
from equipoise.extensions.planning.tracing.obstacles import reason_of
from equipoise.extensions.planning.tracing.packed_step import measure_packed, packed, trace_packed
from equipoise.extensions.planning.tracing.planned_batches import planned_batches
from equipoise.interop.adapters import check_feature
from equipoise.parallel.workers.availability import require_workers
from equipoise.parallel.workers.bounded_call import CallError, call_bounded
from equipoise.tree import items_of

__all__ = ["check_real_steps", "predict_memory"]

# Real steps run only where the module takes a small part of the host's memory: weights, gradients, state, activations.
_LARGEST_PART = 1 / 16


def predict_memory(
    module: nn.Module,
    data: Any,
    *,
    optimizer: Callable[[Any], Optimizer] | None = None,
    precision: str | int = "32-true",
    accumulate_grad_batches: int = 1,
    activation_checkpointing: Sequence[str] = (),
    callbacks: Sequence[Any] = (),
    device: Literal["cpu", "cuda"] = "cpu",
    measure: bool = True,
    timeout: float = 300.0,
) -> MemoryPrediction:
    """Predict the memory of a training step on one device, with any batch size.

    The step is traced in a process of its own, on tensors that have shapes and no memory: `training_step`, its
    backward, and the optimiser's step. The prediction traces it again, in another process, for each further batch size
    that it is asked for. Modules on the device "meta", or built by `configure_model`, need no memory at all. The module
    itself is not used or changed.

    Args:
        module: A `LightningModule`.
        data: A batch, or a loader of which the first batch is taken. A batch sampler of tokens names that with the
            longest samples instead.
        optimizer: Returns the optimiser of the parameters, as a class does: `torch.optim.AdamW`. Default: the optimiser
            of `configure_optimizers`.
        precision: The precision; see `Trainer`. Default: "32-true".
        accumulate_grad_batches: Batches of an accumulation window. Default: 1.
        activation_checkpointing: Patterns of submodules whose activations are computed twice. Default: none.
        callbacks: The trainer's callbacks, of which those count that change layers or keep a copy of the weights.
            Default: none.
        device: "cuda" for a GPU, on which optimisers of torch step all parameters together and need more memory for a
            moment. Not confirmed on a GPU. Default: "cpu".
        measure: Whether real steps with parts of the batch are run where a step cannot be traced. Default: True.
        timeout: Seconds after which a process is ended. Default: 300.

    Raises:
        ConfigurationError: If an argument is wrong, if the step can neither be traced nor run, or if this system
            cannot start processes. The message names the reason and the line.

    Example:
        >>> from equipoise.extensions.planning import predict_memory
        >>> plan = predict_memory(module, torch.empty(64, 28, 28))  # doctest: +SKIP
        >>> plan.peak(256).nbytes, plan.largest_batch(24 * 2**30)  # doctest: +SKIP
    """
    require_workers("`predict_memory`, which BatchSizeFinder calls,", "Set the batch size by hand")
    check_feature(PLAN)

    # 1. The request.
    settings = StepSettings(
        precision=precision,
        accumulate_grad_batches=accumulate_grad_batches,
        activation_checkpointing=tuple(activation_checkpointing),
        callbacks=planned_callbacks(precision, callbacks),
        device=device,
    )
    if not hasattr(module, "training_step"):
        raise ConfigurationError(
            f"A plan needs a LightningModule, whose training_step it traces, not {type(module).__name__}."
        )
    if not timeout > 0:
        raise ConfigurationError(f"timeout must be a number of seconds above 0, not {timeout!r}.")
    example = _first_batch(data)
    # A batch of unknown size is refused here.
    size_of_batch(example)
    request = (module, example, settings, optimizer)

    # 2. The trace, or else real steps.
    prediction: MemoryPrediction
    content = packed(request, with_contents=False)
    try:
        prediction = _traced(content, timeout)
    except CallError as error:
        reason = str(error)
        if error.is_wrong_input or not measure:
            raise ConfigurationError(_untraceable(reason, error)) from error
    else:
        return replace(prediction, of_part=partial(_of_part, content, timeout))
    check_real_steps(module, reason)
    try:
        content = packed(request, with_contents=True)
        prediction = call_bounded(measure_packed, content, timeout=timeout, explain=reason_of)
    except CallError as error:
        raise ConfigurationError(f"The training step can be neither traced ({reason}) nor run ({error}).") from error
    return replace(prediction, notes=[f"{reason}, so real steps were run."])


def _traced(content: bytes, timeout: float, part: Callable[[nn.Module], PlannedPart] | None = None) -> MemoryPrediction:
    """Return the prediction of whole samples, or of a part of each."""
    prediction: MemoryPrediction = call_bounded(trace_packed, content, part, timeout=timeout, explain=reason_of)
    # A partial function, since a prediction can be pickled.
    return replace(prediction, trace=partial(_trace_another, content, timeout, part))


def _trace_another(
    content: bytes, timeout: float, part: Callable[[nn.Module], PlannedPart] | None, samples: int
) -> RecordedStep:
    """Return the step with another number of samples.

    Raises:
        ConfigurationError: If it cannot be traced.
    """
    try:
        prediction: MemoryPrediction = call_bounded(
            trace_packed, content, part, samples, timeout=timeout, explain=reason_of
        )
    except CallError as error:
        raise ConfigurationError(f"a step with {samples} samples cannot be traced: {error}") from error
    return prediction.steps[samples]


def _of_part(content: bytes, timeout: float, part: Callable[[nn.Module], PlannedPart]) -> MemoryPrediction:
    """Return the prediction of a part of each sample.

    Raises:
        ConfigurationError: If the part cannot be traced.
    """
    try:
        return _traced(content, timeout, part)
    except CallError as error:
        raise ConfigurationError(_untraceable(str(error), error)) from error


def check_real_steps(module: nn.Module, reason: str) -> None:
    """Check that real steps of a module do not exhaust the host.

    Raises:
        ConfigurationError: If the module is too large.
    """
    # Parameters on the device "meta" count as well: real steps would give them memory.
    nbytes = sum(parameter.nbytes for parameter in module.parameters())
    available = psutil.virtual_memory().available
    if nbytes > _LARGEST_PART * available:
        raise ConfigurationError(
            f"The training step cannot be traced ({reason}), and the module is too large to run real steps on this"
            " host. Change that line, so that the step needs no value of a tensor."
        )


def _untraceable(reason: str, error: CallError) -> str:
    if error.is_wrong_input:
        return reason
    return f"The training step cannot be traced: {reason}."


def _first_batch(data: Any) -> Any:
    """Return a batch, or one of a loader."""
    is_batch = isinstance(data, (Tensor, str)) or items_of(data) is not None
    if is_batch or not isinstance(data, Iterable):
        return data
    return planned_batches(data).batches[0]
