"""State of a pipeline's run."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from equipoise.extensions.pipeline.cut_choice import CommonCut
from equipoise.extensions.pipeline.network import StagedNetwork
from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.processes.optimizers.backend import ProcessBackend
from equipoise.extensions.pipeline.processes.optimizers.replica_exchange import ReplicaExchange
from equipoise.extensions.pipeline.strategy.pipelined_batch import PipelinedBatch
from equipoise.interop.lightning.callbacks import copies_of
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.communication.membership import compute_metrics_alone
from equipoise.parallel.communication.process_group import group_store
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.step_protocols import NO_RESULT, StepResult, TrainingStep
from equipoise.strategies.distributed.metric_sync import synchronise_metrics
from equipoise.strategies.distributed.module_sync import check_same_modules
from equipoise.strategies.portable_state import LoadState, SaveState

__all__ = ["PipelineRun", "ProcessParts"]

# Result of a step in a replica without a batch.


@dataclass(frozen=True)
class ProcessParts:
    """Parts of a run whose stages are in several processes.

    Attributes:
        backend: Optimisers and states in other processes.
        restore_metrics: Function that gives the module's metrics their former settings.
        exchange: Exchange with other replicas; None if there is one replica.
        common_cut: The cut of all replicas; None if there is one replica.
    """

    backend: ProcessBackend
    restore_metrics: Callable[[], None]
    exchange: ReplicaExchange | None = None
    common_cut: CommonCut | None = None

    @classmethod
    def connect(
        cls, client: StageClient, module: nn.Module, own_state: tuple[SaveState, LoadState], *, has_replicas: bool
    ) -> "ProcessParts":
        """Begin with a module that is in the main process as a whole.

        Args:
            client: The processes of other stages.
            module: The user's module, the same in all replicas once this returns.
            own_state: The functions that `PortableState` takes.
            has_replicas: True if there are several replicas.
        """
        copies = copies_of(module)
        if not has_replicas:
            backend = ProcessBackend(client, module, *own_state, copies)
            restore_metrics = compute_metrics_alone(module)
            return cls(backend, restore_metrics)
        check_same_modules(module)
        for replicated in (module, *copies):
            copy_from_first((*replicated.parameters(), *replicated.buffers()))
        backend = ProcessBackend(client, module, *own_state, copies)
        store = group_store()
        # Replicas have begun their process groups themselves.
        assert store is not None
        return cls(backend, synchronise_metrics(module), ReplicaExchange(backend, module), CommonCut(store))


@dataclass
class PipelineRun:
    """State of a run.

    Attributes:
        network: The network in stages.
        splitter: The splitter of batches.
        processes: Parts in other processes; None if all stages are in this process.
        batch: The batch that is computed now; None between batches.
    """

    network: StagedNetwork
    splitter: Splitter
    processes: ProcessParts | None
    batch: PipelinedBatch | None = None

    @property
    def backend(self) -> ProcessBackend | None:
        """Optimisers and states in other processes; None if all stages are in this process."""
        if self.processes is None:
            return None
        return self.processes.backend

    @property
    def exchange(self) -> ReplicaExchange | None:
        """Exchange with other replicas; None if there is one replica."""
        if self.processes is None:
            return None
        return self.processes.exchange

    @property
    def client(self) -> StageClient | None:
        """The processes of other stages; None if all stages are in this process."""
        if self.processes is None:
            return None
        return self.processes.backend.processes

    def begin_batch(self, batch: PipelinedBatch) -> None:
        """Note the batch whose backwards follow."""
        self.batch = batch

    def end_batch(self) -> None:
        """Release the batch."""
        self.batch = None

    def pass_by(self, step: TrainingStep) -> StepResult:
        """Go without a batch in a step for which other replicas have one.

        Args:
            step: The user's training step, which does not run.
        """
        assert self.client is not None
        if step.begins_window:
            self.client.commands.send_to_all("begin_window")
        step.backward(NO_RESULT)
        return NO_RESULT
