"""Parameters and buffers sent to the workers of a pipeline, and fetched where the whole module is needed.

Of tensors that only workers use, the main process keeps the shapes. Reading the values of such a parameter is an error
(`pipeline.messaging.remote_parameters.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.extensions.pipeline.execution.placement import move
from equipoise.extensions.pipeline.messaging.commands import placeholder
from equipoise.extensions.pipeline.messaging.remote_operations import RemoteOperations
from equipoise.extensions.pipeline.messaging.remote_parameters import (
    bring_back,
    is_elsewhere,
    noted,
    origin_of,
    send_elsewhere,
)
from equipoise.extensions.pipeline.processes.main_process.tensor_placement import TensorPlacement
from equipoise.extensions.pipeline.processes.main_process.worker_commands import WorkerCommands
from equipoise.interop.torch.modules import has_gradient_hooks

__all__ = ["TensorTransfer"]


class TensorTransfer:
    """Moves the tensors of a module between the processes.

    Args:
        commands: Commands to the workers.
        placement: The processes that have each tensor.
        before_move: Called before tensors move to a process that does not have them.
    """

    def __init__(
        self,
        commands: WorkerCommands,
        placement: TensorPlacement,
        before_move: Callable[[], None],
    ) -> None:
        self._commands = commands
        self._placement = placement
        self._before_move = before_move
        # What a callback computes with the parameters of workers.
        self._operations = RemoteOperations(placement.key_of, placement.stages_with)
        # Trainability that the workers were sent last, by key.
        self._trainable: dict[int, bool] = {}

    # Values of the whole module.

    def gather_parameters(self) -> None:
        """Fetch all values of the module. The workers keep theirs."""
        keys = self._placement.keys_elsewhere()
        values = self._fetch(keys)
        for key, value in values.items():
            tensor = self._placement.tensors[key]
            value_here = value.to(tensor.device)
            bring_back(tensor, value_here)

    def release_parameters(self, *, changed: bool = False) -> None:
        """Drop the values that only workers need, after `gather_parameters`.

        Args:
            changed: Whether values were changed in this process, so that the workers receive them. Default: False.
        """
        if changed:
            for stage in range(self._commands.last):
                keys = self._placement.keys_of_worker(stage)
                self._send_values(stage, keys)
            self._commands.messenger.flush()
        for key in self._placement.keys_elsewhere():
            tensor = self._placement.tensors[key]
            _drop_values(tensor)

    @contextmanager
    def gathered_parameters(self, *, changed: bool = False) -> Iterator[None]:
        """Have the whole module in this process; see `release_parameters`."""
        self.gather_parameters()
        try:
            yield
        finally:
            self.release_parameters(changed=changed)

    def send_trainable(self) -> None:
        """Tell the workers which parameters are frozen, if that has changed."""
        trainable = {}
        for key in self._placement.keys_in_workers():
            tensor = self._placement.tensors[key]
            trainable[key] = tensor.requires_grad
        if trainable != self._trainable:
            self._trainable = trainable
            self._commands.send_to_all("tensors.set_trainable", trainable)

    # Computations of callbacks.

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Let a callback compute with the parameters of workers, where they lie, and with present buffers, here."""
        tensors = self._placement.tensors
        # 1. The values that are here, too; buffers are small.
        keys = self._placement.keys_here_too()
        for key, value in self._fetch(filter(self._placement.is_elsewhere, keys)).items():
            tensors[key].data = value.to(tensors[key].device)
        before = {key: tensors[key].detach().clone() for key in keys}

        # 2. The operations.
        with noted(self._operations):
            yield
        self._send_operations()

        # 3. Those of the values that have changed.
        changed = {key for key in keys if not torch.equal(tensors[key], before[key])}
        for stage in range(self._commands.last) if changed else ():
            self._send_values(stage, sorted(changed.intersection(self._placement.keys_of_worker(stage))))
        self._commands.messenger.flush()

    def _send_operations(self) -> None:
        """Let the workers compute what waits."""
        for stage, operations in self._operations.take().items():
            self._commands.send_command(stage, "tensors.compute", operations)

    def complete(self, state: dict[str, Any]) -> None:
        """Replace the tensors of a state that have their values in workers by the values."""
        keys = {}
        for name, value in state.items():
            origin = origin_of(value) if isinstance(value, Tensor) and is_elsewhere(value) else None
            key = self._placement.key_of(origin) if isinstance(origin, Tensor) else None
            if key is not None:
                keys[name] = key
        values = self._fetch(sorted(set(keys.values())))
        state.update((name, values[key]) for name, key in keys.items())

    # Values of single tensors.

    def _fetch(self, keys: Iterable[int]) -> dict[int, Tensor]:
        """Return for each key the values of a tensor that only workers have."""
        self._send_operations()
        # 1. Ask each owner for its tensors.
        keys_of_stages: dict[int, list[int]] = {}
        for key in keys:
            stage = self._placement.owner_of(key)
            keys_of_stage = keys_of_stages.setdefault(stage, [])
            keys_of_stage.append(key)
        commands = {}
        for stage, keys_of_stage in keys_of_stages.items():
            commands[stage] = ("tensors.values_of", keys_of_stage)

        # 2. Receive them.
        values: dict[int, Tensor] = {}
        replies = self._commands.request(commands)
        for reply in replies.values():
            values |= reply
        return values

    def _send_values(self, stage: int, keys: Iterable[int]) -> None:
        values = {}
        trainable = {}
        for key in keys:
            tensor = self._placement.tensors[key]
            values[key] = tensor
            trainable[key] = tensor.requires_grad
        self._commands.send_command(stage, "tensors.load", values, trainable)

    # Moves.

    def move(self, keys_of_processes: Sequence[set[int]]) -> None:
        """Send tensors to the processes that need them, and fetch those that this process needs.

        Args:
            keys_of_processes: For each process the keys of the tensors that it needs; the last is this process.

        Raises:
            ConfigurationError: If the user watches the gradient of a parameter that moves.
        """
        # 1. Find the tensors that must move.
        keys_of_workers = keys_of_processes[:-1]
        needed_here = keys_of_processes[-1]
        missing_of_workers = []
        moving: set[int] = set()
        for stage, keys in enumerate(keys_of_workers):
            missing = self._missing_keys(stage, keys)
            missing_of_workers.append(missing)
            moving |= missing
        # Values from one worker to another pass through this process.
        missing_here = self._missing_keys(self._commands.last, moving | needed_here)
        self._check_hooks(moving)

        # 2. Fetch values.
        if moving or missing_here:
            self._before_move()
        values = self._fetch(sorted(missing_here))
        for key, value in values.items():
            tensor = self._placement.tensors[key]
            bring_back(tensor, value)
        self._placement.need_here(needed_here)

        # 3. Send values.
        if moving:
            for stage, missing in enumerate(missing_of_workers):
                self._send_values(stage, sorted(missing))
                self._placement.add_worker(stage, missing)
            self._send_gradients(sorted(moving))
            self._commands.messenger.flush()

        # 4. Move what this process needs to its device, and drop the rest. What was fetched may lie on another one.
        for key in self._placement.needed_here - self._placement.on_host:
            move(self._placement.tensors[key], self._commands.devices[-1])
        if moving:
            self.release_parameters()

    def _send_gradients(self, keys: Iterable[int]) -> None:
        """Send gradients of an open accumulation window with the parameters that leave this process."""
        for key in keys:
            tensor = self._placement.tensors[key]
            gradient = tensor.grad
            if gradient is not None and self._placement.is_elsewhere(key):
                # The gradients of tied parameters are summed over the workers, so one of them takes it.
                stage = self._placement.owner_of(key)
                self._commands.send_command(stage, "tensors.set_gradients", {key: gradient})
                tensor.grad = None

    def _missing_keys(self, stage: int, keys: set[int]) -> set[int]:
        """Return those of the keys whose tensors the process of a stage does not have."""
        missing = set()
        for key in keys:
            if not self._placement.has_tensor(stage, key):
                missing.add(key)
        return missing

    def _check_hooks(self, keys: set[int]) -> None:
        """Check that no hook of the user watches a gradient that is about to be computed in another process."""
        if any(has_gradient_hooks(self._placement.tensors[key]) for key in keys):
            raise ConfigurationError(
                "A parameter of the network has a hook on its gradient, but under engine='processes' it lies in another"
                " process. Take engine='threads', or do without the hook."
            )


def _drop_values(tensor: Tensor) -> None:
    """Leave a parameter its shape only. Buffers stay: they are small, and snapshots copy them."""
    if isinstance(tensor, nn.Parameter):
        without_values = placeholder(tensor.shape, tensor.dtype)
        tensor.data = without_values.to(tensor.device)
        send_elsewhere(tensor)
