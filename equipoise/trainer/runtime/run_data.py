"""RunData: the data of one run. Loaders are requested from their sources, batches are read, and copied to devices."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch

from equipoise.interop.lightning.classes import is_overridden
from equipoise.parallel.snapshot import random_state
from equipoise.precision import Precision
from equipoise.strategies.distributed.run_steps import RunSteps
from equipoise.strategies.strategy import Strategy, Transfer
from equipoise.to_device import copy_batch
from equipoise.trainer.data.batch_stream import NOTHING, BatchStream
from equipoise.trainer.data.loaders import Loaders, Source
from equipoise.trainer.hooks.hooks import Hooks
from equipoise.trainer.state.run_state import RunState

if TYPE_CHECKING:
    from equipoise.trainer.data.prefetch import Prefetch

__all__ = ["RunData"]


class RunData:
    """The data of one run.

    Args:
        state: The settings.
        strategy: The strategy.
        hooks: The hooks of the module and the data module.
        precision: The precision.
        sources: The origin of the loaders of each stage: "train", "val", "test" and "predict".
    """

    def __init__(
        self, state: RunState, strategy: Strategy, hooks: Hooks, precision: Precision, sources: dict[str, Source]
    ) -> None:
        self.sources = sources
        self._state = state
        self._strategy = strategy
        self._hooks = hooks
        self._precision = precision
        # Copies batches beside the computation; made on its first use.
        self._prefetch: Prefetch | None = None

    @property
    def can_validate(self) -> bool:
        """True if a fit can validate: there is a loader, a `validation_step`, and no limit of 0."""
        if not self.sources["val"].is_defined():
            return False
        if not is_overridden("validation_step", self._hooks.module):
            return False
        return self._state.limit_val_batches > 0

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
        call_hook = self._hooks.call_datamodule
        if source.owner is self._hooks.module:
            call_hook = self._hooks.call_module
        with self._same_random_numbers():
            iterables = source.request(call_hook)
        self._strategy.processes.barrier(f"{stage}_dataloader()")

        # 2. The share of this process, and the limit.
        return Loaders(
            source,
            iterables,
            limit=limit,
            overfit=overfit,
            strategy=self._strategy,
            share=self._state.use_distributed_sampler,
            steps=steps,
        )

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Let all processes draw the numbers of rank 0: a hook may split a data set at random."""
        processes = self._strategy.processes
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
        hooks = self._hooks
        convert = self._precision.convert_input
        before = hooks.bind_data("on_before_batch_transfer")
        move = hooks.bind_data("transfer_batch_to_device")
        after = hooks.bind_data("on_after_batch_transfer")
        action = hooks.action_of_strategy("batch_to_device")
        copy = self._copier(user_copies=move is not None)
        is_plain = convert is None and before is None and move is None and after is None
        if is_plain:
            return hooks.profiled(copy, action)

        # 2. A function that calls them.
        def transfer(batch: Any, device: torch.device) -> Any:
            if convert is not None:
                batch = convert(batch)
            if before is not None:
                batch = before(batch, dataloader_idx)
            batch = copy(batch, device) if move is None else move(batch, device, dataloader_idx)
            if after is not None:
                batch = after(batch, dataloader_idx)
            return batch

        return hooks.profiled(transfer, action)

    def _copier(self, *, user_copies: bool) -> Callable[[Any, torch.device], Any]:
        """Return the function that copies a batch, beside the computation where that is possible."""
        choice = self._state.prefetch
        devices = self._strategy.devices
        if choice is False or (choice == "auto" and all(device.type != "cuda" for device in devices)):
            return copy_batch
        if self._prefetch is None:
            from equipoise.trainer.data.prefetch import Prefetch

            self._prefetch = Prefetch(choice)
        return self._prefetch.copier(devices, user_copies=user_copies)

    def batches(self, stream: BatchStream, action: str, num_read: int = 0) -> Iterable[Any]:
        """Return the batches of a stream; a profiler, or a callback that wraps calls, measures the reading of each.

        Args:
            stream: The stream.
            action: The name of the reading of a batch in the profile.
            num_read: Number of batches that were read before. Default: 0.
        """
        batches: Iterable[Any] = stream
        read = self._hooks.wrapped(next, action)
        if read is not next:
            # Opened when it is first asked for a batch, and without a place that holds one.
            batches = map(read, repeat(chain((), stream)))
        if not self._hooks.is_profiled:
            return batches
        return self._timed_batches(stream, iter(batches), action, num_read)

    def _timed_batches(self, stream: BatchStream, batches: Iterator[Any], action: str, num_read: int) -> Iterator[Any]:
        while stream.length is None or num_read < stream.length:
            with self._hooks.profile(action):
                batch = next(batches, NOTHING)
            if batch is NOTHING:
                return
            num_read += 1
            yield batch
            # The memory of the batch is free while the next one is read.
            del batch
