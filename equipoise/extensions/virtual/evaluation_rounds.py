"""Evaluations in rounds: each process evaluates a batch, then all log the values of all, in the order of batches."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.step_protocols import EvaluationStep

__all__ = ["EvaluationRounds"]


class EvaluationRounds:
    """Lets all processes log what one process would.

    Args:
        processes: The processes.
        device: Where this process computes.
        size_of: Function that returns the number of samples of a batch; None if it is unknown.
    """

    def __init__(self, processes: Processes, device: torch.device, size_of: Callable[[Any], int | None]) -> None:
        self._processes = processes
        self._device = device
        self._size_of = size_of

    def run(self, step: EvaluationStep, part: Any) -> Any:
        """Evaluate a batch of this process, and log the values of this round.

        Args:
            step: The user's step.
            part: The batch.

        Returns:
            The output of the step.
        """
        output, logged = step.capture_logs(partial(step, part))
        tensors = [each for each in logged if isinstance(each.value, Tensor)]
        others = [each for each in logged if not isinstance(each.value, Tensor)]
        # Metrics are those of this process, which has updated them with its own batches.
        step.log_together([others], [1], self._device, original=_itself)
        size = self._size_of(part) or 1
        sent = []
        for each in tensors:
            batch_size = size if each.batch_size is None else each.batch_size
            sent.append(each._replace(value=each.value.detach().cpu(), batch_size=batch_size))
        self._log_round(step, sent)
        return output

    def finish(self, step: EvaluationStep) -> None:
        """Log the values of rounds in which this process has no batch; all processes end together.

        Args:
            step: The step that evaluated the loader's batches.
        """
        while self._log_round(step, None):
            pass

    def _log_round(self, step: EvaluationStep, logged: list[Any] | None) -> bool:
        """Log the values of all processes in the order of their batches. Return False if none has a batch any more."""
        of_processes = self._processes.gather_objects(logged)
        for of_process in of_processes:
            if of_process:
                step.log_together([of_process], [1], self._device, original=_itself)
        return any(of_process is not None for of_process in of_processes)


def _itself(metric: Any) -> Any:
    return metric
