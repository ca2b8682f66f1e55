"""Calls of the module computed on several devices, as with `nn.DataParallel`."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from equipoise.errors import StepError
from equipoise.parallel.batches.gathering import gather
from equipoise.parallel.batches.splitting import holds_samples, infer_batch_size, split, why_not
from equipoise.parallel.replicas.replicas import Replicas
from equipoise.parallel.step_protocols import EvaluationStep, TrainingStep
from equipoise.strategies.replicated.scalar_outputs import ScalarOutputs

__all__ = ["Compute", "ReplicatedForward"]

# Runs a function on each of several devices. It receives the index of the device with each function, and the number of
# samples of each, and returns the results.
Compute = Callable[[Sequence[tuple[int, Callable[[], Any]]], Sequence[int]], list[Any]]


class ReplicatedForward:
    """Splits the arguments of the module's `forward`, computes the parts on all devices, and gathers the outputs.

    Args:
        module: The user's module.
        replicas: Its replicas.
        output_device: The device of the outputs.
        dim: The dimension of the samples.
        sizes: Function that returns the number of samples of each device for a number of samples.
        compute: Function that runs a function on each device.

    Attributes:
        was_called: True if `forward` has been called.
    """

    def __init__(
        self,
        module: nn.Module,
        replicas: Replicas,
        output_device: torch.device,
        dim: int,
        sizes: Callable[[int], list[int]],
        compute: Compute,
    ) -> None:
        self.was_called = False
        self._module = module
        self._replicas = replicas
        self._output_device = output_device
        self._dim = dim
        self._sizes = sizes
        self._compute = compute
        self._scalars = ScalarOutputs()
        # True once arguments were split: then the sizes of later ones are not checked as strictly.
        self._has_split = False
        # Has `is_replica` in threads that compute a part.
        self._thread = threading.local()

    def check(self, loss: Tensor | None) -> None:
        """Refuse a loss that `forward` computed in parts; see `ScalarOutputs.check`."""
        self._scalars.check(loss)

    @contextmanager
    def replaced(self, step: TrainingStep | EvaluationStep) -> Iterator[None]:
        """Replace the module's `forward` during a block, so that calls of the module are computed on all devices."""
        attributes = vars(self._module)
        # The user may have set a function on the object.
        user_function = attributes.get("forward")
        original = self._module.forward

        def restore() -> None:
            del attributes["forward"]
            if user_function is not None:
                attributes["forward"] = user_function

        def forward(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._thread, "is_replica", False):
                return original(*args, **kwargs)
            # Replicas are copies of the module as it is without this function.
            restore()
            try:
                return self._forward(step, original, args, kwargs)
            finally:
                attributes["forward"] = forward

        attributes["forward"] = forward
        try:
            yield
        finally:
            restore()

    def _forward(
        self,
        step: TrainingStep | EvaluationStep,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.was_called = True
        # 1. Split the arguments. A device without samples takes no part, but one device computes an empty batch.
        inputs = (args, kwargs)
        sizes_of_devices = self._sizes(self._batch_size(args, kwargs))
        indices = [index for index, size in enumerate(sizes_of_devices) if size] or [0]
        sizes = [sizes_of_devices[index] for index in indices]
        self._replicas.refresh(indices)
        parts = [inputs]
        if len(indices) > 1:
            parts = split(inputs, sizes, self._dim)

        # 2. Compute the parts.
        work = []
        for index, part in zip(indices, parts, strict=True):
            forward = self._replicas[index].forward if index else original
            work.append((index, self._computation(step, forward, part, index)))
        with self._replicas.metrics_in_parts(indices, sizes), self._replicas.connected(indices):
            results = self._compute(work, sizes)
        self._replicas.give_back(indices[0])

        # 3. Log once, and gather the outputs.
        outputs = [output for output, _ in results]
        logged = [values for _, values in results]
        step.log_together(logged, sizes, self._output_device, original=self._replicas.original)
        gathered = gather(outputs, sizes, self._output_device, dim=self._dim)
        self._scalars.watch(outputs, gathered)
        return gathered

    def _batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of samples in the arguments of a call."""
        arguments = (args, kwargs)
        size = infer_batch_size(arguments, self._dim)
        if size is None or holds_samples(arguments, self._has_split):
            inputs = (*args, kwargs) if kwargs else args
            reason = why_not(inputs, self._dim, "What forward is called with", "argument")
            raise StepError(
                f"{reason} Choose parallelize='step', which cuts batches and not arguments, or bring the samples to one"
                " dimension."
            )
        self._has_split = True
        return size

    def _computation(
        self, step: TrainingStep | EvaluationStep, forward: Callable[..., Any], part: Any, index: int
    ) -> Callable[[], Any]:
        def run() -> Any:
            args, kwargs = move_data_to_device(part, self._replicas.devices[index])
            self._thread.is_replica = True
            try:
                return step.capture_logs(lambda: forward(*args, **kwargs))
            finally:
                self._thread.is_replica = False

        return run
