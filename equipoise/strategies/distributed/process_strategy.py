"""ProcessStrategy: the base of strategies that compute in several processes, each with its share of the data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from equipoise.errors import ConfigurationError
from equipoise.parallel.batches.sampling import NO_BATCH
from equipoise.parallel.batches.shard import Shard
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.step_protocols import NO_RESULT, StepResult, TrainingStep
from equipoise.precision import Precision
from equipoise.strategies.distributed.loaders import Sizes, refuse_missing_batch, shard_of_process
from equipoise.strategies.distributed.metric_sync import synchronise_metrics
from equipoise.strategies.distributed.module_sync import check_same_modules, share_batch_statistics
from equipoise.strategies.distributed.process_group import ProcessGroup
from equipoise.strategies.strategy import Strategy, Transfer

__all__ = ["ProcessRun", "ProcessStrategy", "same_in_all_processes"]


@dataclass(kw_only=True)
class ProcessRun:
    """State of a run in this process, where several compute together. Strategies add fields of their own.

    Attributes:
        restores: Functions that restore the module at the end.
        shares_statistics: True if layers compute batch statistics over all processes.
    """

    restores: list[Callable[[], None]] = field(default_factory=list)
    shares_statistics: bool = False

    def share_statistics(self, restore: Callable[[], None]) -> None:
        """Note that layers compute batch statistics over all processes."""
        self.restores.append(restore)
        self.shares_statistics = True

    def close(self) -> None:
        """Restore the module at the end of the run."""
        for restore in self.restores:
            restore()


class ProcessStrategy(Strategy):
    """A process for each device, each with its share of the data.

    This class starts the processes or joins them, shares out the data, exchanges values, and begins with the same
    module in all processes. How a step's gradients come together is left to a derived class: it overrides the methods
    of `Strategy` that compute. In this class each process steps by itself. If the module is the same in all processes
    after each step, `replicated_tensors` says so: then it is compared between them.

    Args:
        timeout: Seconds for which processes wait for one another before a missing one counts as hung. Default: 1800.
        backend: Torch's backend. Default: "nccl" on CUDA, else "gloo".

    Attributes:
        steps_together: Whether the processes exchange gradients in each step, so that all of them need a batch in each
            step of manual optimisation. Default: True.
        has_one_state: Whether all processes have the state of one after each step; see `Processes`. Default: False.

    Raises:
        ConfigurationError: If an argument is out of range.
    """

    steps_together: ClassVar[bool] = True
    has_one_state: ClassVar[bool] = False

    # State of a run; None in a run of one process, which needs none.
    _run: ProcessRun | None = None

    def __init__(self, *, timeout: float = 1800.0, backend: str | None = None) -> None:
        if not timeout > 0:
            raise ConfigurationError(f"timeout is a positive number of seconds, not {timeout!r}.")
        self.timeout = timeout
        self.backend = backend
        # The processes, once the devices are known.
        self._group: ProcessGroup | None = None

    # Where it runs.

    def default_devices(self, available: Sequence[torch.device]) -> Sequence[torch.device]:
        """Return all devices; see `Strategy.default_devices`."""
        return available

    def connect(self, devices: Sequence[torch.device], num_nodes: int = 1) -> None:
        """Use one device for each process of this machine; see `Strategy.connect`."""
        group = ProcessGroup(
            devices,
            num_nodes,
            timeout=self.timeout,
            backend=self.backend,
            on_joined=self._use_device_of_process,
            step_together=self.steps_together,
            has_one_state=self.has_one_state,
        )
        self._group = group
        self.processes = group
        self._use_device_of_process()

    def _use_device_of_process(self) -> None:
        assert self._group is not None
        self.devices = (self._group.device,)

    # The module, for the time of a run.

    def setup(self, module: nn.Module, precision: Precision) -> None:
        """Place the module, the same in all processes; see `Strategy.setup`."""
        super().setup(module, precision)
        if self.processes.world_size > 1:
            self._run = self._begin_run(module)

    def _begin_run(self, module: nn.Module) -> ProcessRun:
        """Return the state of a run; called in each of several processes, once the module is on its device.

        Those of this package return state of their own, with what `same_in_all_processes` returns among its `restores`.

        Args:
            module: The user's module.
        """
        return ProcessRun(restores=[same_in_all_processes(module)])

    def share_batch_statistics(self, module: nn.Module) -> None:
        """Replace BatchNorm layers while the run lasts; see `Strategy.share_batch_statistics`."""
        if self._run is not None:
            self._run.share_statistics(share_batch_statistics(module, self.root_device))

    def sync_buffers(self) -> None:
        """Copy the buffers of rank 0, which checkpoints hold, to all processes; see `Strategy.sync_buffers`."""
        if self._group is not None and self._group.is_connected and self._module is not None:
            copy_from_first(self._module.buffers())

    def teardown(self, error: BaseException | None = None) -> None:
        """Release what the run holds; see `Strategy.teardown`."""
        # The field is reset first, so that an error below leaves no state of the run behind.
        run = self._run
        self._run = None
        if self._group is not None:
            self._group.forget_failure()
        if run is not None:
            run.close()
        super().teardown(error)

    # Data.

    def shard(self, loader: Any, stage: str) -> Shard:
        """Return this process's part of a loader; see `Strategy.shard`."""
        return shard_of_process(loader, stage, self.processes.data, self._sizes_for)

    def _sizes_for(self, loader: Any) -> Sizes | None:
        """Return the function that divides the steps of a training loader; None: evenly."""
        return None

    def batch_to_devices(self, batch: Any, transfer: Transfer) -> Sequence[Any]:
        """Copy a batch to the device; see `Strategy.batch_to_devices`."""
        refuse_missing_batch(batch, shares_statistics=self._run is not None and self._run.shares_statistics)
        # This process joins the exchange of the step without a batch.
        if batch is NO_BATCH:
            return ()
        return (transfer(batch, self.devices[0]),)

    # Computation.

    def forward_backward(self, step: TrainingStep, parts: Sequence[Any], last: bool) -> StepResult:
        """Compute the gradients of this process; see `Strategy.forward_backward`."""
        if parts:
            return super().forward_backward(step, parts, last)
        # Others have a batch in this step. Gradients of the step before must not be used again.
        step.backward(NO_RESULT)
        return NO_RESULT


def same_in_all_processes(module: nn.Module) -> Callable[[], None]:
    """Give all processes the parameters and buffers of rank 0, and compute metrics over all of them.

    Returns:
        A function that restores the metrics.

    Raises:
        ConfigurationError: If the module differs between processes; then every process raises.
    """
    check_same_modules(module)
    copy_from_first((*module.parameters(), *module.buffers()))
    return synchronise_metrics(module)
