"""RunContext: the objects that the parts of one run share."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.optim import Optimizer

from equipoise.callbacks.callback import Callback
from equipoise.interop.lightning.classes import is_overridden
from equipoise.parallel.snapshot import random_state
from equipoise.precision import Precision
from equipoise.strategies.distributed.run_steps import RunSteps
from equipoise.strategies.strategy import Strategy, Transfer
from equipoise.trainer.checkpointing.module.hyperparameters import UnplacedHyperparameters
from equipoise.trainer.data.batch_stream import NOTHING, BatchStream
from equipoise.trainer.data.loaders import Loaders, Source
from equipoise.trainer.data.prefetch import Prefetch
from equipoise.trainer.hooks.hooks import Hooks, overrides
from equipoise.trainer.logging.logger_output import LoggerOutput
from equipoise.trainer.logging.logs import Logs
from equipoise.trainer.state.run_state import RunState

if TYPE_CHECKING:
    from equipoise.parallel.optimizers.combined_optimizer import CombinedOptimizer

__all__ = ["RunContext"]


@dataclass
class RunContext:
    """The parts of one run.

    Attributes:
        state: Settings, stage, counters and objects of the trainer.
        module: The user's module.
        datamodule: The user's data module, if there is one.
        strategy: The strategy, which computes the steps.
        precision: The precision of the computation.
        hooks: The hooks that callbacks, module and data module override.
        logs: The logged values.
        logger_output: Hands logged values to the loggers.
        as_lightning: Returns what automatic optimisation steps in the form in which `optimizer_step` receives it.
        save_checkpoint: The trainer's method, called with a path.
        trainer_validates: Returns the trainer's `enable_validation`.
        prefetch: Copies batches beside the computation, where that is possible.
        sources: The origin of the loaders of each stage.
        unplaced: Hyperparameters that hold networks, as they were before the strategy changed layers; None if it does
            not.
        fitting: The sizes that fit into memory, as far as training and evaluations have measured them.
    """

    state: RunState
    module: LightningModule
    datamodule: LightningDataModule | None
    strategy: Strategy
    precision: Precision
    hooks: Hooks
    logs: Logs
    logger_output: LoggerOutput
    as_lightning: Callable[[Optimizer], LightningOptimizer]
    save_checkpoint: Callable[[str | os.PathLike[str]], None]
    trainer_validates: Callable[[], bool]
    prefetch: Prefetch
    sources: dict[str, Source] = field(default_factory=dict)
    unplaced: UnplacedHyperparameters | None = None
    fitting: dict[str, Any] = field(default_factory=dict)
    _combined: "CombinedOptimizer | None" = None

    def stepped_optimizer(self) -> Optimizer:
        """Return what automatic optimisation steps: the optimiser, or several of them as one."""
        optimizers = self.state.optimizers
        if len(optimizers) == 1:
            return optimizers[0]
        from equipoise.parallel.optimizers.combined_optimizer import CombinedOptimizer

        # One object as long as the optimisers are the same: strategies know it by its identity.
        if self._combined is None or self._combined.optimizers != optimizers:
            self._combined = CombinedOptimizer(optimizers)
        return self._combined

    @property
    def global_step(self) -> int:
        """Number of optimiser steps done, over all optimisers; it is not reset."""
        return self.state.progress.steps(automatic=self.module.automatic_optimization).completed

    @property
    def enable_validation(self) -> bool:
        """True if a fit validates, by the trainer's property of this name."""
        return self.trainer_validates()

    @property
    def can_validate(self) -> bool:
        """True if a fit can validate: there is a loader, a `validation_step`, and no limit of 0."""
        if not self.sources["val"].is_defined():
            return False
        if not is_overridden("validation_step", self.module):
            return False
        return self.state.limit_val_batches > 0

    @property
    def validates_in_epoch(self) -> bool:
        """True if a fit validates in the present epoch."""
        if not self.enable_validation:
            return False
        every = self.state.check_val_every_n_epoch
        return every is None or (self.state.current_epoch + 1) % every == 0

    @property
    def recovers(self) -> bool:
        """True if a callback decides what happens when memory runs out."""
        return any(overrides(callback, "on_out_of_memory", Callback) for callback in self.hooks.callbacks)

    def request_loaders(
        self, stage: str, limit: float, *, overfit: bool = False, steps: RunSteps | None = None
    ) -> Loaders:
        """Request the loaders of a stage from their source, and prepare them.

        Args:
            stage: "train", "val", "test" or "predict".
            limit: The `limit_*_batches` of the stage.
            overfit: Whether to turn shuffling off. Default: False.
            steps: The steps of the training run. Default: None, those of the loaders.
        """
        # 1. The hook of the module or data module, in all processes.
        source = self.sources[stage]
        call_hook = self.hooks.call_datamodule
        if source.owner is self.module:
            call_hook = self.hooks.call_module
        with self._same_random_numbers():
            iterables = source.request(call_hook)
        self.strategy.processes.barrier(f"{stage}_dataloader()")

        # 2. The share of this process, and the limit.
        return Loaders(
            source,
            iterables,
            limit=limit,
            overfit=overfit,
            strategy=self.strategy,
            share=self.state.use_distributed_sampler,
            steps=steps,
        )

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Let all processes draw the numbers of rank 0: a hook may split a data set at random."""
        processes = self.strategy.processes
        if processes.world_size == 1:
            yield
            return
        # Those of the host, which split data.
        state = processes.broadcast(random_state.capture_host().state_dict())
        if processes.is_main:
            yield
            return
        with random_state.isolated():
            random_state.RandomState.from_state_dict(state).restore()
            yield

    def make_transfer(self, dataloader_idx: int = 0) -> Transfer:
        """Return the function that copies a batch to a device, with the user's transfer hooks.

        Args:
            dataloader_idx: The number of the loader, for the hooks. Default: 0.
        """
        # 1. The hooks that are overridden; None for the others.
        hooks = self.hooks
        convert = self.precision.convert_input
        before = hooks.bind_data("on_before_batch_transfer")
        move = hooks.bind_data("transfer_batch_to_device")
        after = hooks.bind_data("on_after_batch_transfer")
        action = hooks.action_of_strategy("batch_to_device")
        copy = self.prefetch.copier(self.strategy.devices, user_copies=move is not None)
        is_plain = convert is None and before is None and move is None and after is None
        if is_plain:
            return hooks.profiled(copy, action)

        # 2. A function that calls them.
        def transfer(batch: Any, device: torch.device) -> Any:
            if convert is not None:
                batch = convert(batch)
            if before is not None:
                batch = before(batch, dataloader_idx)
            if move is None:
                batch = copy(batch, device)
            else:
                batch = move(batch, device, dataloader_idx)
            if after is not None:
                batch = after(batch, dataloader_idx)
            return batch

        return hooks.profiled(transfer, action)

    def batches(self, stream: BatchStream, action: str, num_read: int = 0) -> Iterable[Any]:
        """Return the batches of a stream; a profiler, or a callback that wraps calls, measures the reading of each.

        Args:
            stream: The stream.
            action: The name of the reading of a batch in the profile.
            num_read: Number of batches that were read before. Default: 0.
        """
        batches: Iterable[Any] = stream
        read = self.hooks.wrapped(next, action)
        if read is not next:
            # Opened when it is first asked for a batch, and without a place that holds one.
            batches = map(read, repeat(chain((), stream)))
        if not self.hooks.is_profiled:
            return batches
        return self._timed_batches(stream, iter(batches), action, num_read)

    def _timed_batches(self, stream: BatchStream, batches: Iterator[Any], action: str, num_read: int) -> Iterator[Any]:
        while stream.length is None or num_read < stream.length:
            with self.profile(action):
                batch = next(batches, NOTHING)
            if batch is NOTHING:
                return
            num_read += 1
            yield batch
            # The memory of the batch is free while the next one is read.
            del batch

    def profile(self, action: str) -> AbstractContextManager[Any]:
        """Measure a block, if there is a profiler.

        Args:
            action: The name of the block in the profile.
        """
        if self.hooks.is_profiled:
            return self.hooks.profiler.profile(action)
        return nullcontext()
