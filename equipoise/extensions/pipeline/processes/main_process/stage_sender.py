"""Stages sent to the workers of a pipeline: calls, and the layers that these use."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from equipoise.extensions.pipeline.graph.stage_spec import describe, used_parts
from equipoise.extensions.pipeline.graph.stages import StageProgram
from equipoise.extensions.pipeline.graph.training_modes import modes_of
from equipoise.extensions.pipeline.processes.main_process.tensor_placement import TensorPlacement
from equipoise.extensions.pipeline.processes.main_process.tensor_transfer import TensorTransfer
from equipoise.extensions.pipeline.processes.main_process.worker_commands import WorkerCommands
from equipoise.parallel.payload.shared_payload import dumps

__all__ = ["StageSender"]


class StageSender:
    """Sends stages, each layer once.

    Args:
        commands: Commands to the workers.
        placement: The processes that have each tensor.
        transfer: Moves the tensors of layers.
        module: The user's module.
    """

    def __init__(
        self,
        commands: WorkerCommands,
        placement: TensorPlacement,
        transfer: TensorTransfer,
        module: nn.Module,
    ) -> None:
        self._commands = commands
        self._placement = placement
        self._transfer = transfer
        # Number of programs so far.
        self._programs = 0
        # For the identity of a submodule its name.
        self._names: dict[int, str] = {}
        for name, submodule in module.named_modules():
            self._names[id(submodule)] = name
        # For each worker the names of the layers that it has received.
        self._sent_layers: list[set[str]] = []
        for _ in range(commands.last):
            self._sent_layers.append(set())

    def send(self, root: nn.Module, stages: Sequence[StageProgram]) -> int:
        """Send every worker its stages, and return the number by which the workers know them.

        Args:
            root: Module to which the names in the stages' calls refer.
            stages: All stages.
        """
        # 1. Find the layers that each process needs.
        count = len(self._commands.devices)
        layers_of_processes = []
        keys_of_processes = []
        for index in range(count):
            layers = _layers_of(stages[index::count], root)
            layers_of_processes.append(layers)
            keys_of_processes.append(self._placement.keys_of_layers(layers))

        # 2. Move their tensors. `placement.tensors` then stand for them in what is pickled.
        self._transfer.move(keys_of_processes)

        # 3. Send the layers and the calls.
        self._programs += 1
        for stage in range(self._commands.last):
            self._send_to(stage, stages[stage::count], layers_of_processes[stage])
        self._commands.messenger.flush()
        return self._programs

    def _send_to(
        self,
        stage: int,
        programs: Sequence[StageProgram],
        layers: Mapping[str, Any],
    ) -> None:
        """Send a worker its calls, and the layers that it does not have yet."""
        # 1. Name the layers as all programs do, and find those that are new.
        sent_layers = self._sent_layers[stage]
        names = {}
        new_layers = {}
        modes = {}
        for target, layer in layers.items():
            # What is no submodule has a name of its own in each program.
            name = self._names.get(id(layer), f"{self._programs}:{target}")
            names[target] = name
            if name not in sent_layers:
                new_layers[name] = layer
            if isinstance(layer, nn.Module):
                modes[name] = modes_of(layer)

        # 2. Send them with the calls.
        specs = [describe(program) for program in programs]
        content = dumps(new_layers, self._placement.tensors)
        self._commands.send_command(
            stage,
            "program",
            self._programs,
            specs,
            content,
            names,
            modes,
        )
        sent_layers.update(new_layers)


def _layers_of(programs: Sequence[StageProgram], root: nn.Module) -> dict[str, Any]:
    layers: dict[str, Any] = {}
    for program in programs:
        layers |= used_parts(program, root)
    return layers
