"""Evaluations in rounds: each process evaluates a batch, then all log the values of all, in the order of batches."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.extensions.virtual.parts.metric_exchange import MetricExchange
from equipoise.extensions.virtual.parts.part_batches import seed_generators, state_key
from equipoise.extensions.virtual.parts.refusals import checking_part
from equipoise.interop.metrics import MetricState
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.snapshot.random_state import RandomState, capture_host, fork, isolated
from equipoise.parallel.step_protocols import EvaluationStep
from equipoise.strategies.strategy import Transfer

__all__ = ["EvaluationRounds", "logged_on_cpu"]


class _BatchReport(NamedTuple):
    """A batch, as far as other processes must know of it.

    Attributes:
        logged: The values that were logged, on the CPU, with names in the place of metrics.
        metrics: The states of the metrics that the batch has updated.
    """

    logged: list[Any]
    metrics: list[MetricState]


class EvaluationRounds:
    """Lets all processes log what one process would.

    Args:
        module: The user's module.
        processes: The processes.
        device: The device of this process.
        metrics: The metrics of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        processes: Processes,
        device: torch.device,
        metrics: MetricExchange,
    ) -> None:
        self._module = module
        self._processes = processes
        self._device = device
        self._metrics = metrics
        # The rounds of the present pass over a loader, and what the random numbers of the pass depend on.
        self._rounds = 0
        self._key = ""
        self._state: RandomState | None = None
        # The same of the transfers of batches, which may be read ahead.
        self._transfers = 0
        self._key_of_transfers = ""

    def drawing_alike(self, transfer: Transfer) -> Transfer:
        """Return a function that copies a batch, with random numbers that follow from the number of the batch."""

        def copied(part: Any, device: torch.device) -> Any:
            if not self._transfers:
                self._key_of_transfers = state_key()
            number = self._transfers * self._processes.world_size + self._processes.rank
            self._transfers += 1
            with isolated():
                seed_generators("transfer", self._key_of_transfers, number)
                return transfer(part, device)

        return copied

    def run(self, step: EvaluationStep, part: Any) -> Any:
        """Evaluate a batch of this process, and log the values of this round.

        Returns:
            The output of the step.
        """
        if not self._rounds:
            self._key = state_key()
            self._state = capture_host()
        number = self._rounds * self._processes.world_size + self._processes.rank
        self._rounds += 1
        self._metrics.begin()
        try:
            with isolated(), checking_part(self._module, "An evaluation step", buffers=True):
                seed_generators("evaluation", self._key, number)
                output, logged = step.capture_logs(partial(step, part))
            report = _BatchReport(logged_on_cpu(self._metrics.named(logged), step.batch_size()), self._metrics.take())
        finally:
            self._metrics.restore()
        self._log_round(step, report)
        return output

    def finish(self, step: EvaluationStep) -> None:
        """Log the values of rounds in which this process has no batch; all processes end together.

        Args:
            step: The step that evaluated the loader's batches.
        """
        while self._log_round(step, None):
            pass
        # The next pass has other random numbers, the same in all processes, however many batches their hooks have seen.
        state = self._processes.broadcast(None if self._state is None else self._state.state_dict())
        if state is not None:
            RandomState.from_state_dict(state).restore()
        fork(1)
        self._rounds = 0
        self._transfers = 0
        self._state = None

    def _log_round(self, step: EvaluationStep, report: _BatchReport | None) -> bool:
        """Log the values of all processes in the order of their batches. Return False if none has a batch any more."""
        reports = [batch_report for batch_report in self._processes.gather_objects(report) if batch_report is not None]
        for batch_report in reports:
            self._metrics.begin()
            self._metrics.merge([batch_report.metrics], [1])
            step.log_together([self._metrics.found(batch_report.logged)], [1], self._device, original=_itself)
        return bool(reports)


def logged_on_cpu(logged: Sequence[Any], size: int) -> list[Any]:
    """Return logged values for other processes.

    Args:
        logged: The values that a part or a batch has logged.
        size: The number of its samples: without it a value would weigh as much as the batch of the process that logs.
    """
    sent = []
    for entry in logged:
        value = entry.value
        if isinstance(value, Tensor):
            value = value.detach().cpu()
        batch_size = size if entry.batch_size is None else entry.batch_size
        sent.append(entry._replace(value=value, batch_size=batch_size))
    return sent


def _itself(metric: Any) -> Any:
    return metric
