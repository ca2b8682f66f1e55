"""Parameters and buffers sent to the workers of a pipeline, and fetched where the whole module is needed.

Of tensors that only workers use, the main process keeps the shapes. Reading the values of such a parameter is an error
(`pipeline.messaging.remote_parameters.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError, StepError
from equipoise.extensions.pipeline.execution.placement import move
from equipoise.extensions.pipeline.messaging.commands import placeholder
from equipoise.extensions.pipeline.messaging.remote_operations import RemoteOperations
from equipoise.extensions.pipeline.messaging.remote_parameters import (
    bring_back,
    is_elsewhere,
    noted,
    origin_of,
    send_buffer_elsewhere,
    send_elsewhere,
)
from equipoise.extensions.pipeline.processes.main_process.tensor_placement import TensorPlacement
from equipoise.extensions.pipeline.processes.main_process.worker_commands import WorkerCommands
from equipoise.interop.torch.modules import has_gradient_hooks
from equipoise.parallel.divergence.digests import digests_of, has_digest

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
        self._operations = RemoteOperations(placement.key_of, placement.workers_with)
        # Whether the workers compute a step, and whether their buffers were fetched since the last one.
        self._in_step = False
        self._buffers_are_here = False
        # Digests of tensors that are here and in workers, when all had the same values.
        self._noted: dict[int, Tensor] = {}
        # Trainability that the workers were sent last, by key.
        self._trainable: dict[int, bool] = {}

    # Values of the whole module.

    def gather_parameters(self) -> None:
        """Fetch all values of the module. The workers keep theirs."""
        self.send_buffers()
        keys = self._placement.keys_elsewhere()
        for key, value in self._fetch(keys).items():
            tensor = self._placement.tensors[key]
            bring_back(tensor, value.to(tensor.device))

    @contextmanager
    def gathered_parameters(self, *, changed: bool = False) -> Iterator[None]:
        """Have the whole module in this process within the context.

        Args:
            changed: Whether values are changed in this process, so that the workers receive them. Default: False.
        """
        self.gather_parameters()
        try:
            yield
        finally:
            if changed:
                self._send_values(self._placement.keys_of_workers)
            self._drop_values_elsewhere()

    def _drop_values_elsewhere(self) -> None:
        """Leave the parameters of workers their shapes, and fetch their buffers when these are looked at."""
        self._buffers_are_here = False
        for key in self._placement.keys_elsewhere():
            tensor = self._placement.tensors[key]
            if not isinstance(tensor, nn.Parameter):
                send_buffer_elsewhere(tensor, self._fetch_buffers)
            else:
                without_values = placeholder(tensor.shape, tensor.dtype)
                send_elsewhere(tensor, without_values.to(tensor.device))

    # Steps.

    def begin_step(self) -> None:
        """Send the workers what the user has changed since the last step, before they compute."""
        self.send_trainable()
        self.send_buffers()
        self.send_shared()
        self._in_step = True

    def end_step(self) -> None:
        """Note that the workers have computed."""
        self._in_step = False
        self.note_shared()

    def note_shared(self) -> None:
        """Note the values of tensors that are here and in workers."""
        self._noted = self._digests()

    def send_shared(self) -> None:
        """Send the workers the values of tensors that are here, too, if they have changed since they were noted."""
        digests = self._digests()
        changed = {key for key, digest in self._noted.items() if not torch.equal(digest, digests[key])}
        if changed:
            self._send_values([changed & keys_of_worker for keys_of_worker in self._placement.keys_of_workers])

    def _digests(self) -> dict[int, Tensor]:
        tensors = self._placement.tensors
        keys = self._placement.keys_in_workers() & self._placement.needed_here
        return {key: digests_of([tensors[key]]) for key in keys if has_digest(tensors[key])}

    def _fetch_buffers(self) -> None:
        """Fetch all buffers, for the user or our own snapshots; `send_buffers` sends them back."""
        if self._in_step:
            raise StepError(
                "A buffer of another stage was read or changed during a step, in which its process computes. Do so in"
                " a hook, such as `on_train_batch_end`, or take engine='threads'."
            )
        tensors = self._placement.tensors
        keys = {key for key in self._placement.keys_elsewhere() if self._is_buffer(key)}
        # After a failure of another process nothing arrives any more, and earlier values stay.
        values = {key: tensors[key] for key in keys} if self._commands.messenger.broken else self._fetch(keys)
        for key, value in values.items():
            bring_back(tensors[key], value.to(tensors[key].device))
        self._buffers_are_here = True

    def send_buffers(self) -> None:
        """Send the workers their buffers, if these were fetched: they may have been changed."""
        if self._buffers_are_here:
            self._send_values([set(filter(self._is_buffer, keys)) for keys in self._placement.keys_of_workers])
            self._drop_values_elsewhere()

    def _is_buffer(self, key: int) -> bool:
        return not isinstance(self._placement.tensors[key], nn.Parameter)

    def send_trainable(self) -> None:
        """Tell the workers which parameters are frozen, if that has changed."""
        tensors = self._placement.tensors
        trainable = {}
        for key in self._placement.keys_in_workers():
            trainable[key] = tensors[key].requires_grad
        if trainable != self._trainable:
            self._trainable = trainable
            self._commands.send_to_all("tensors.set_trainable", trainable)

    # Computations of callbacks.

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Let a callback compute with the parameters of workers, where they lie, and with present buffers, here."""
        tensors = self._placement.tensors
        self.send_buffers()
        # 1. The values that are here, too; buffers are small.
        keys = self._placement.keys_here_too()
        elsewhere = filter(self._placement.is_elsewhere, keys)
        for key, value in self._fetch(elsewhere).items():
            tensor = tensors[key]
            bring_back(tensor, value.to(tensor.device))
        before = {key: tensors[key].detach().clone() for key in keys}

        # 2. The operations.
        with noted(self._operations):
            yield
        self._send_operations()

        # 3. Those of the values that have changed.
        changed = {key for key in keys if not torch.equal(tensors[key], before[key])}
        if changed:
            keys_of_workers = [changed & keys_of_worker for keys_of_worker in self._placement.keys_of_workers]
            self._send_values(keys_of_workers)
        self._drop_values_elsewhere()

    def _send_operations(self) -> None:
        """Let the workers compute what waits."""
        for stage, operations in self._operations.take().items():
            self._commands.send_command(stage, "tensors.compute", operations)
        self._commands.messenger.flush()

    def complete(self, state: dict[str, Any]) -> None:
        """Replace the tensors of a state that have their values in workers by the values."""
        keys = {}
        for name, value in state.items():
            origin = origin_of(value) if isinstance(value, Tensor) and is_elsewhere(value) else None
            key = self._placement.key_of(origin) if isinstance(origin, Tensor) else None
            if key is not None:
                keys[name] = key
        values = self._fetch(set(keys.values()))
        state.update((name, values[key]) for name, key in keys.items())

    # Values of single tensors.

    def gather_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Fetch the gradients of parameters that only workers have. The workers keep theirs."""
        keys = map(self._placement.key_of, parameters)
        present = [key for key in keys if key is not None]
        for key, gradient in self._fetch(present, "tensors.gradients_of").items():
            parameter = self._placement.tensors[key]
            parameter.grad = None if gradient is None else gradient.to(parameter.device)

    def _fetch(self, keys: Iterable[int], command: str = "tensors.values_of") -> dict[int, Any]:
        """Return for each key the values of a tensor that only workers have, or what another command asks for."""
        self._send_operations()
        # 1. Ask each owner for its tensors.
        keys_of_owners: dict[int, list[int]] = {}
        for key in sorted(keys):
            owner = self._placement.workers_with(key)[0]
            keys_of_owners.setdefault(owner, []).append(key)
        commands = {}
        for owner, keys_of_owner in keys_of_owners.items():
            commands[owner] = (command, keys_of_owner)

        # 2. Receive them.
        values: dict[int, Any] = {}
        for reply in self._commands.request(commands).values():
            values |= reply
        return values

    def _send_values(self, keys_of_workers: Sequence[set[int]]) -> None:
        """Send each worker the values of tensors."""
        for stage, keys in enumerate(keys_of_workers):
            values = {}
            trainable = {}
            for key in sorted(keys):
                tensor = self._placement.tensors[key]
                values[key] = tensor
                trainable[key] = tensor.requires_grad
            self._commands.send_command(stage, "tensors.load", values, trainable)
        self._commands.messenger.flush()

    # Moves.

    def move(self, keys_of_processes: Sequence[set[int]]) -> None:
        """Send tensors to the processes that need them, and fetch those that this process needs.

        Args:
            keys_of_processes: For each process the keys of the tensors that it needs; the last is this process.

        Raises:
            ConfigurationError: If the user watches the gradient of a parameter that moves.
        """
        # 1. Find the tensors that must move. Values from one worker to another pass through this process.
        self.send_buffers()
        placement = self._placement
        *keys_of_workers, needed_here = keys_of_processes
        missing = []
        for keys, present in zip(keys_of_workers, placement.keys_of_workers, strict=True):
            missing.append(keys - present)
        moving = set().union(*missing)
        missing_here = {key for key in moving | needed_here if placement.is_elsewhere(key)}
        self._check_hooks(moving)

        # 2. Fetch values.
        if moving or missing_here:
            self._before_move()
        for key, value in self._fetch(missing_here).items():
            bring_back(placement.tensors[key], value)
        placement.needed_here.update(needed_here)

        # 3. Send values.
        if moving:
            self._send_values(missing)
            for present, keys in zip(placement.keys_of_workers, missing, strict=True):
                present |= keys
            self._send_gradients(moving)

        # 4. Move what this process needs to its device, and drop the rest. What was fetched may lie on another one.
        for key in placement.needed_here - placement.on_host:
            move(placement.tensors[key], self._commands.devices[-1])
        self._drop_values_elsewhere()

    def _send_gradients(self, keys: Iterable[int]) -> None:
        """Send gradients of an open accumulation window with the parameters that leave this process."""
        for key in keys:
            tensor = self._placement.tensors[key]
            gradient = tensor.grad
            if gradient is not None and self._placement.is_elsewhere(key):
                # The gradients of tied parameters are summed over the workers, so one of them takes it.
                stage = self._placement.workers_with(key)[0]
                self._commands.send_command(stage, "tensors.set_gradients", {key: gradient})
                tensor.grad = None
        self._commands.messenger.flush()

    def _check_hooks(self, keys: Iterable[int]) -> None:
        """Check that no hook of the user watches a gradient that is about to be computed in another process."""
        tensors = [self._placement.tensors[key] for key in keys]
        if any(map(has_gradient_hooks, tensors)):
            raise ConfigurationError(
                "A parameter of the network has a hook on its gradient, but under engine='processes' it lies in another"
                " process. Take engine='threads', or do without the hook."
            )
