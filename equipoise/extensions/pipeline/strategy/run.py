"""State of a pipeline's run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from equipoise.extensions.pipeline.network import StagedNetwork
from equipoise.extensions.pipeline.processes.main_process.client import StageClient
from equipoise.extensions.pipeline.processes.optimizers.backend import ProcessBackend
from equipoise.extensions.pipeline.processes.optimizers.replica_exchange import ReplicaExchange
from equipoise.extensions.pipeline.strategy.pipelined_batch import PipelinedBatch
from equipoise.parallel.batches.splitting import Splitter
from equipoise.parallel.step_protocols import NO_RESULT, StepResult, TrainingStep

__all__ = ["PipelineRun"]


@dataclass
class PipelineRun:
    """State of a run.

    Attributes:
        network: The network in stages.
        splitter: The splitter of batches.
        backend: Optimisers and states in other processes; None if all stages are in this process.
        exchange: Exchange with other replicas; None if there is one replica.
        restore_metrics: Function that gives the module's metrics their former settings; None if they have these.
        batch: The batch that is computed now; None between batches.
        follow: Calls `on_after_backward` for the last batch; None once it was called.
    """

    network: StagedNetwork
    splitter: Splitter
    backend: ProcessBackend | None = None
    exchange: ReplicaExchange | None = None
    restore_metrics: Callable[[], None] | None = None
    batch: PipelinedBatch | None = None
    follow: Callable[[], None] | None = None

    @property
    def client(self) -> StageClient | None:
        """The processes of other stages; None if all stages are in this process."""
        if self.backend is None:
            return None
        return self.backend.processes

    @contextmanager
    def computing(self, batch: PipelinedBatch) -> Iterator[None]:
        """Note the batch whose backwards run within the context."""
        self.batch = batch
        try:
            yield
        finally:
            self.batch = None

    def follow_backward(self) -> None:
        """Call `on_after_backward` for the last batch, if that is due."""
        follow = self.follow
        self.follow = None
        if follow is not None:
            if self.backend is not None:
                self.backend.collect_gradients()
            follow()

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
