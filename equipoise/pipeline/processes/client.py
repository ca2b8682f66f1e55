"""The workers of a pipeline, as the main process commands them.

Each worker holds the parameters and buffers that its stages use. Of tensors that only workers use, the main process
keeps the shapes: reading such a parameter is an error (`parallel/communication/remote_parameters.py`), and the main
process fetches the values where the whole module is needed. A parameter that several stages use lies in each of their
processes. Their gradients are summed before the optimisers step, so the optimisers do the same everywhere.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.errors import ConfigurationError
from equipoise.interop.torch.modules import has_hooks
from equipoise.parallel.communication.remote_parameters import bring_back, send_elsewhere
from equipoise.parallel.payload.shared_payload import dumps
from equipoise.pipeline.graph.stage_spec import describe, parameters_and_buffers, used_parts
from equipoise.pipeline.graph.stages import StageProgram
from equipoise.pipeline.graph.training_modes import modes_of
from equipoise.pipeline.messaging.commands import COMMAND, REPLY, TensorSpec, placeholder, rank_of
from equipoise.pipeline.messaging.messages import Messenger, StageError

__all__ = ["StageClient"]


class StageClient:
    """Commands the workers, and records which process has which tensor.

    A worker is named by its first stage. The last stage, and the number `last`, stand for the main process. Tensors are
    named by their keys: their indices among all parameters and buffers of the module.

    Args:
        messenger: Connection to the workers.
        devices: The device of each process, in the order of their first stages; the last is the main process's.

    Attributes:
        messenger, devices: As above.
        last: Number of the first stage of the main process.
        tensors: All parameters and buffers of the module.
        steps: Number of training steps so far, from which the random numbers of the stages follow.
        failed: Device of the stage that failed first since `clear_failure`; None if none has.
    """

    def __init__(self, messenger: Messenger, devices: Sequence[torch.device]) -> None:
        self.messenger = messenger
        self.devices = list(devices)
        self.last = len(devices) - 1
        self.steps = 0
        self.failed: torch.device | None = None
        self._evaluations = 0
        # Called before tensors move to a process that does not have them.
        self._before_move: Callable[[], None] | None = None
        self._module: nn.Module | None = None
        self._programs = 0

    # Commands.

    def send_command(self, stage: int, name: str, *arguments: Any) -> None:
        """Send a command to a worker, and wait for nothing."""
        has_reply = False
        message = (has_reply, name, *arguments)
        self.messenger.send(self._rank_of(stage), COMMAND, message)

    def _rank_of(self, stage: int) -> int:
        return rank_of(stage, len(self.devices))

    def send_to_all(self, name: str, *arguments: Any) -> None:
        """Send a command to all workers, and wait for nothing."""
        for stage in range(self.last):
            self.send_command(stage, name, *arguments)

    def request(self, commands: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Send commands to workers, and return their replies.

        Args:
            commands: For each stage the name of the command and its arguments.

        Raises:
            BaseException: Error of a worker, in one of these commands or in an earlier one.
        """
        # 1. Send all commands before waiting for the first reply.
        has_reply = True
        for stage, command in commands.items():
            message = (has_reply, *command)
            self.messenger.send(self._rank_of(stage), COMMAND, message)

        # 2. Receive all replies before an error is raised.
        results = {}
        failures = []
        for stage in commands:
            result, failure = self.messenger.receive(self._rank_of(stage), REPLY)
            results[stage] = result
            if failure is not None:
                failures.append(failure)
        if failures:
            raise self.as_error(failures[0])
        return results

    def request_all(self, *command: Any) -> list[Any]:
        """Send a command to all workers, and return their replies in the order of stages."""
        commands = dict.fromkeys(range(self.last), command)
        return list(self.request(commands).values())

    # Failures.

    def as_error(self, failure: StageError) -> BaseException:
        """Return the error that arrived in place of a value, and record its device."""
        self.note_failure(torch.device(failure.device))
        return failure.as_error()

    def note_failure(self, device: torch.device) -> None:
        """Record the device of a failed stage. The first failure counts."""
        if self.failed is None:
            self.failed = device

    def clear_failure(self) -> None:
        """Forget the failure of an earlier step."""
        self.failed = None

    # Places of tensors.

    def begin(self, module: nn.Module, before_move: Callable[[], None]) -> None:
        """Begin with a module, all of which is still in this process.

        Args:
            module: The module.
            before_move: Called before tensors move to a process that does not have them.
        """
        self._module = module
        self._before_move = before_move
        self.tensors: list[Tensor] = []
        # By the identity of a tensor its key, by that of a submodule its name.
        self._keys: dict[int, int] = {}
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in self._keys:
                self._keys[id(tensor)] = len(self.tensors)
                self.tensors.append(tensor)
        self._names = {id(submodule): name for name, submodule in module.named_modules()}
        # For a key the workers that have the tensor.
        self._workers_with: dict[int, list[int]] = {}
        # Keys of tensors that the main process needs among these.
        self._needed_here: set[int] = set()
        # For each worker the names of the layers that it has received.
        self._layers_of: list[set[str]] = [set() for _ in range(self.last)]
        self._trainable: dict[int, bool] = {}
        self._programs = 0
        specs = []
        for tensor in self.tensors:
            is_parameter = isinstance(tensor, nn.Parameter)
            shape = tuple(tensor.shape)
            specs.append(TensorSpec(is_parameter, shape, tensor.dtype))
        self.send_to_all("begin", specs)

    def key_of(self, tensor: Tensor) -> int | None:
        """Return the key of a tensor; None if the module does not have it."""
        return self._keys.get(id(tensor))

    def is_elsewhere(self, key: int) -> bool:
        """Return True if only workers have a tensor."""
        return key in self._workers_with and key not in self._needed_here

    def has_tensor(self, stage: int, key: int) -> bool:
        """Return True if the process of a stage has a tensor."""
        if stage == self.last:
            return not self.is_elsewhere(key)
        return stage in self._workers_with.get(key, ())

    def keys_elsewhere(self) -> list[int]:
        """Return the keys of the tensors that only workers have."""
        return [key for key in self._workers_with if self.is_elsewhere(key)]

    def tied_parameters(self) -> dict[int, list[int]]:
        """Return for the key of each trainable parameter of several processes the workers that have it."""
        tied = {}
        for key, stages in self._workers_with.items():
            count = len(stages)
            if key in self._needed_here:
                count += 1
            if count > 1 and self.tensors[key].requires_grad:
                tied[key] = stages
        return tied

    def owner_of(self, key: int) -> int:
        """Return the first stage that has a tensor."""
        stages = self._workers_with.get(key, [self.last])
        return stages[0]

    def fetch(self, keys: Sequence[int]) -> dict[int, Tensor]:
        """Return for each key the values of a tensor that only workers have."""
        keys_of_stages: dict[int, list[int]] = {}
        for key in keys:
            stage = self.owner_of(key)
            keys_of_stages.setdefault(stage, []).append(key)
        commands = {stage: ("give", keys) for stage, keys in keys_of_stages.items()}
        values: dict[int, Tensor] = {}
        for reply in self.request(commands).values():
            values |= reply
        return values

    def gather_parameters(self) -> None:
        """Fetch all values of the module. The workers keep theirs."""
        values = self.fetch(self.keys_elsewhere())
        for key, value in values.items():
            tensor = self.tensors[key]
            bring_back(tensor, value.to(tensor.device))

    def release_parameters(self, *, changed: bool = False) -> None:
        """Drop the values that only workers need, after `gather_parameters`.

        Args:
            changed: Whether values were changed in this process, so that the workers receive them. Default: False.
        """
        if changed:
            for stage in range(self.last):
                keys = [key for key, stages in self._workers_with.items() if stage in stages]
                self._send_values(stage, keys)
            self.messenger.flush()
        for key in self.keys_elsewhere():
            _drop_values(self.tensors[key])

    def _send_values(self, stage: int, keys: Sequence[int]) -> None:
        values = {}
        trainable = {}
        for key in keys:
            tensor = self.tensors[key]
            values[key] = tensor
            trainable[key] = tensor.requires_grad
        self.send_command(stage, "take", values, trainable)

    @contextmanager
    def gathered_parameters(self, *, changed: bool = False) -> Iterator[None]:
        """Have the whole module in this process; see `release_parameters`."""
        self.gather_parameters()
        try:
            yield
        finally:
            self.release_parameters(changed=changed)

    def end(self) -> None:
        """Let the workers drop the module, all of which is in this process again."""
        self.send_to_all("begin", [])
        self.messenger.flush()
        self._module = None
        self._workers_with = {}

    def send_trainable(self) -> None:
        """Tell the workers which parameters are frozen, if that has changed."""
        trainable = {key: self.tensors[key].requires_grad for key in self._workers_with}
        if trainable != self._trainable:
            self._trainable = trainable
            self.send_to_all("learn", trainable)

    # Stages.

    def send_stages(self, root: nn.Module, stages: Sequence[StageProgram]) -> int:
        """Send every worker its stages, and return the number by which the workers know them.

        Args:
            root: Module to which the names in the stages' calls refer.
            stages: All stages.
        """
        assert self._module is not None
        count = len(self.devices)

        # 1. Find the layers that each process needs.
        stages_of_processes = [stages[index::count] for index in range(count)]
        layers_of_processes = []
        for programs in stages_of_processes:
            layers: dict[str, Any] = {}
            for program in programs:
                layers |= used_parts(program, root)
            layers_of_processes.append(layers)

        # 2. Move their tensors. `self.tensors` then stand for them in what is pickled.
        self._place([self._keys_in(layers) for layers in layers_of_processes])

        # 3. Send the layers and the calls.
        self._programs += 1
        for stage in range(self.last):
            self._send_stages_to(stage, stages_of_processes[stage], layers_of_processes[stage])
        self.messenger.flush()
        return self._programs

    def _keys_in(self, layers: Mapping[str, Any]) -> set[int]:
        """Return the keys of the tensors of layers."""
        keys = set()
        for layer in layers.values():
            for tensor in parameters_and_buffers(layer):
                key = self.key_of(tensor)
                if key is not None:
                    keys.add(key)
        return keys

    def _send_stages_to(self, stage: int, programs: Sequence[StageProgram], layers: Mapping[str, Any]) -> None:
        """Send a worker its calls, and the layers that it does not have yet.

        Args:
            stage: First stage of the worker.
            programs: Its stages.
            layers: The layers that these use, by their names in the calls.
        """
        names = {}
        new_layers = {}
        modes = {}
        for target, layer in layers.items():
            # What is no submodule has a name of its own in each program.
            name = self._names.get(id(layer), f"{self._programs}:{target}")
            names[target] = name
            if name not in self._layers_of[stage]:
                new_layers[name] = layer
            if isinstance(layer, nn.Module):
                modes[name] = modes_of(layer)
        specs = [describe(program) for program in programs]
        content = dumps(new_layers, self.tensors)
        self.send_command(stage, "program", self._programs, specs, content, names, modes)
        self._layers_of[stage] |= new_layers.keys()

    def _place(self, keys_of_processes: Sequence[set[int]]) -> None:
        """Send tensors to the processes that need them, and fetch those that this process needs.

        Args:
            keys_of_processes: For each process the keys of the tensors that it needs; the last is this process.
        """
        # 1. Find the tensors that must move.
        needed_here = keys_of_processes[-1]
        lacking = []
        moving: set[int] = set()
        for stage, keys in enumerate(keys_of_processes[:-1]):
            lacking_keys = {key for key in keys if not self.has_tensor(stage, key)}
            lacking.append(lacking_keys)
            moving |= lacking_keys
        missing_here = sorted(key for key in moving | needed_here if self.is_elsewhere(key))
        self._check_hooks(moving)

        # 2. Fetch values, those that only pass through this process, too.
        if (moving or missing_here) and self._before_move is not None:
            self._before_move()
        for key, value in self.fetch(missing_here).items():
            bring_back(self.tensors[key], value)
        self._needed_here |= needed_here
        if not moving:
            return

        # 3. Send values.
        for stage, keys in enumerate(lacking):
            self._send_values(stage, sorted(keys))
            for key in keys:
                stages = self._workers_with.setdefault(key, [])
                stages.append(stage)
                stages.sort()
        self.messenger.flush()

        # 4. Move what this process needs to its device, and drop the rest.
        for key in self._needed_here:
            tensor = self.tensors[key]
            tensor.data = tensor.data.to(self.devices[-1])
        self.release_parameters()

    def _check_hooks(self, keys: set[int]) -> None:
        """Check that no hook of the user watches a gradient that is about to be computed in another process.

        Raises:
            ConfigurationError: If one does.
        """
        if any(has_hooks(self.tensors[key]) for key in keys):
            raise ConfigurationError(
                "A parameter of the network has a hook on its gradient, but under engine='processes' it lies in another"
                " process. Take engine='threads', or do without the hook."
            )

    # Random numbers.

    def next_training_seed(self) -> int:
        """Count a training step, and return its seed. It is the same in a run that was interrupted and resumed."""
        self.steps += 1
        self._evaluations += 1
        return _seed_of(f"{self.steps}")

    def next_evaluation_seed(self) -> int:
        """Return the seed of a call of the network outside of training steps."""
        self._evaluations += 1
        return _seed_of(f"{self.steps}, {self._evaluations}")


def _seed_of(count: str) -> int:
    """Return a seed of 48 bits that follows from torch's and a count."""
    text = f"{torch.initial_seed()}, {count}"
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:6], "little")


def _drop_values(tensor: Tensor) -> None:
    """Leave a parameter its shape only. Buffers stay: they are small, and snapshots copy them."""
    if isinstance(tensor, nn.Parameter):
        tensor.data = placeholder(tensor.shape, tensor.dtype).to(tensor.device)
        send_elsewhere(tensor)
