"""`predict_memory`: the peak of a step as a function of its batch size, before the first step."""

import json
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.errors import ConfigurationError
from equipoise.extensions.planning.curve.curve import MemoryCurve
from equipoise.extensions.planning.curve.parts import PredictedPeak
from equipoise.extensions.planning.curve.sampled import SampledCurve
from equipoise.extensions.planning.description.loads import WHOLE_STEP, DeviceLoad, StepFacts
from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.process.empty_pickling import packed
from equipoise.extensions.planning.process.results import curve_of_plain
from equipoise.extensions.planning.process.worker import predict
from equipoise.extensions.planning.tracing.batches import size_of_batch
from equipoise.extensions.planning.tracing.tracer import Method, StepCurve
from equipoise.interop.adapters import check_feature
from equipoise.parallel.workers.availability import require_workers
from equipoise.parallel.workers.bounded_call import call_bounded
from equipoise.tree import items_of

__all__ = ["MemoryPrediction", "check_real_steps", "predict_memory", "predicted"]

# Real steps run only where the module takes a small part of the host's memory: weights, gradients, state, activations.
_LARGEST_PART = 1 / 16


@dataclass(frozen=True, kw_only=True)
class MemoryPrediction:
    """Predicted memory of a training step.

    Attributes:
        batch_size: Samples of the batch that was given.
        curve: The memory of one device as a function of the batch size.
        method: "traced" (two traces without memory), "traced at several sizes" (the step differs from size to size, so
            values between them are estimates) or "measured" (real steps with parts of the batch).
        notes: What was guessed, with the lines of the user's code.
        accumulate_grad_batches: Batches of an accumulation window. Default: 1.
    """

    batch_size: int
    curve: MemoryCurve | SampledCurve
    method: Method
    notes: Sequence[str] = ()
    accumulate_grad_batches: int = 1

    def peak(self, batch_size: int | None = None, load: DeviceLoad = WHOLE_STEP, rounding: int = 1) -> PredictedPeak:
        """Return the peak of a device at a batch size.

        Args:
            batch_size: Samples of a batch. Default: those of the given one.
            load: The part of the step that the device has; see `device_loads`. Default: all of it.
            rounding: Bytes to which an allocator rounds each storage up, 512 on CUDA. Default: 1.
        """
        if batch_size is None:
            batch_size = self.batch_size
        return self.curve.peak(batch_size, load, rounding)

    def largest_batch(self, limit: int, load: DeviceLoad = WHOLE_STEP, rounding: int = 1) -> int:
        """Return the largest batch size that fits; 0 if none does.

        Args:
            limit: Memory of the device in bytes.
            load: The part of the step that the device has. Default: all of it.
            rounding: Bytes to which an allocator rounds each storage up. Default: 1.
        """
        return self.curve.largest_batch(limit, load, rounding)

    @property
    def facts(self) -> StepFacts:
        """Facts of the step that hold for every batch size."""
        totals = self.curve.totals
        return StepFacts(
            parameters=totals.get("parameter", 0),
            gradients=totals.get("gradient", 0),
            optimizer_state=totals.get("optimizer state", 0),
            buffers=totals.get("buffer", 0),
            accumulates=self.accumulate_grad_batches > 1,
        )


def predict_memory(
    module: nn.Module,
    data: Any,
    *,
    optimizer: Callable[[Any], Optimizer] | None = None,
    precision: str | int = "32-true",
    accumulate_grad_batches: int = 1,
    activation_checkpointing: Sequence[str] = (),
    device: Literal["cpu", "cuda"] = "cpu",
    measure: bool = True,
    timeout: float = 300.0,
) -> MemoryPrediction:
    """Predict the memory of a training step on one device, as a function of the batch size.

    The step is traced twice in a process of its own, on tensors that have shapes and no memory: `training_step`, its
    backward, and the optimiser's step. Modules on the device "meta", or built by `configure_model`, need no memory at
    all. The module itself is not used or changed.

    Args:
        module: A `LightningModule`.
        data: A batch, or a loader of which the first batch is taken.
        optimizer: Returns the optimiser of the parameters, as a class does: `torch.optim.AdamW`. Default: the optimiser
            of `configure_optimizers`.
        precision: The precision; see `Trainer`. Default: "32-true".
        accumulate_grad_batches: Batches of an accumulation window. Default: 1.
        activation_checkpointing: Patterns of submodules whose activations are computed twice. Default: none.
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
    check_feature("plan")

    # 1. The request.
    settings = StepSettings(
        precision=precision,
        accumulate_grad_batches=accumulate_grad_batches,
        activation_checkpointing=tuple(activation_checkpointing),
        device=device,
    )
    if not hasattr(module, "training_step"):
        raise ConfigurationError(
            f"A plan needs a LightningModule, whose training_step it traces, not {type(module).__name__}."
        )
    if not timeout > 0:
        raise ConfigurationError(f"timeout must be a number of seconds above 0, not {timeout!r}.")
    example = _first_batch(data)
    batch_size = size_of_batch(example)
    request = (module, example, settings, optimizer)

    # 2. The trace, or else real steps.
    result = _run(True, packed(request, with_contents=False), timeout)
    if "reason" in result:
        reason = str(result["reason"])
        if result.get("is_wrong_input") or not measure:
            raise ConfigurationError(_untraceable(reason, result))
        check_real_steps(module, reason)
        result = _run(False, packed(request, with_contents=True), timeout)
        if "reason" in result:
            raise ConfigurationError(
                f"The training step can be neither traced ({reason}) nor run ({result['reason']})."
            )
        result["notes"] = [f"{reason}, so real steps were run."]
    return predicted(curve_of_plain(result), batch_size, settings)


def predicted(found: StepCurve, batch_size: int, settings: StepSettings) -> MemoryPrediction:
    """Return the prediction of a curve.

    Args:
        found: The curve of the step.
        batch_size: Samples of the batch of which it was made.
        settings: The settings of the step.
    """
    return MemoryPrediction(
        batch_size=batch_size,
        curve=found.curve,
        method=found.method,
        notes=found.notes,
        accumulate_grad_batches=settings.accumulate_grad_batches,
    )


def check_real_steps(module: nn.Module, reason: str) -> None:
    """Check that real steps of a module do not exhaust the host.

    Args:
        module: The module, whose parameters need no memory yet.
        reason: The reason why they would run.

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


def _run(is_traced: bool, content: bytes, timeout: float) -> dict[str, Any]:
    """Return the answer of a process: a curve, or the reason why there is none."""
    # The folder belongs to this user alone, and disappears with what is in it.
    with tempfile.TemporaryDirectory(prefix="equipoise-plan-") as folder:
        result_file = Path(folder, "result.json")
        reason = call_bounded(
            predict,
            result_file,
            pickle.dumps((is_traced, content)),
            timeout=timeout,
            output=Path(folder, "output.txt"),
        )
        if result_file.is_file():
            result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
            return result
    return {"reason": reason or "its process left no result"}


def _untraceable(reason: str, result: dict[str, Any]) -> str:
    if result.get("is_wrong_input"):
        return reason
    return f"The training step cannot be traced: {reason}."


def _first_batch(data: Any) -> Any:
    """Return a batch, or the first one of a loader."""
    if isinstance(data, (Tensor, str)) or items_of(data) is not None:
        return data
    if not isinstance(data, (Iterable, Iterator)):
        return data
    # The rest of the loader is not read.
    for batch in data:
        return batch
    raise ConfigurationError("A plan needs one batch, but the loader is empty.")
