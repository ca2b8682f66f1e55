"""The workers of a pipeline, as the main process uses them.

Each worker holds the parameters and buffers that its stages use. The main process records who has which tensor, moves
their values, sends stages, and commands the steps. A parameter that several stages use lies in each of their processes.
Their gradients are summed before the optimisers step, so the optimisers do the same everywhere.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from equipoise.extensions.pipeline.forward.layer_marks import LayerMarks
from equipoise.extensions.pipeline.graph.stage_spec import describe, used_parts
from equipoise.extensions.pipeline.graph.stages import StageProgram
from equipoise.extensions.pipeline.graph.training_modes import modes_of
from equipoise.extensions.pipeline.messaging.messages import Messenger
from equipoise.extensions.pipeline.processes.main_process.step_seeds import StepSeeds
from equipoise.extensions.pipeline.processes.main_process.tensor_placement import TensorPlacement
from equipoise.extensions.pipeline.processes.main_process.tensor_transfer import TensorTransfer
from equipoise.extensions.pipeline.processes.main_process.worker_commands import WorkerCommands
from equipoise.parallel.payload.object_bytes import dumps

__all__ = ["StageClient"]


class StageClient:
    """The workers, and their parts of a module.

    Args:
        messenger: Connection to the workers.
        devices: The device of each process, in the order of their first stages; the last is the main process's.
        replica: Number of this replica of the pipeline. Default: 0.

    Attributes:
        commands: Commands to the workers, and their failures.
        seeds: Seeds of the stages' random numbers.
        placement: The processes that have each tensor of the module, from `begin` on.
        transfer: Moves the values of these tensors, from `begin` on.
    """

    placement: TensorPlacement
    transfer: TensorTransfer

    def __init__(self, messenger: Messenger, devices: Sequence[torch.device], replica: int = 0) -> None:
        self.commands = WorkerCommands(messenger, devices)
        self.seeds = StepSeeds(replica)
        # Number of programs so far.
        self._programs = 0
        # For the identity of a submodule its name, and for each worker the names of the layers that it has received.
        self._names: dict[int, str] = {}
        self._sent_layers: list[set[str]] = []
        self._marks: list[LayerMarks] = []

    def begin(self, module: nn.Module, before_move: Callable[[], None], copies: Iterable[nn.Module] = ()) -> None:
        """Begin with a module, all of which is still in this process.

        Args:
            module: The module.
            before_move: Called before tensors move to a process that does not have them.
            copies: Copies of the module, whose parameters move with those of the module. Default: none.
        """
        commands = self.commands
        self.placement = TensorPlacement(module, commands.last)
        for copied in copies:
            self.placement.adopt(module, copied, commands.devices[-1])
        self.transfer = TensorTransfer(commands, self.placement, before_move)
        self._names = {id(submodule): name for name, submodule in module.named_modules()}
        self._sent_layers = [set() for _ in range(commands.last)]
        self._marks = []
        commands.send_to_all("begin", self.placement.specs())

    def end(self) -> None:
        """Let the workers drop the module, all of which is in this process again."""
        self.commands.send_to_all("begin", [])
        self.commands.messenger.flush()

    def send_stages(self, root: nn.Module, stages: Sequence[StageProgram]) -> int:
        """Send every worker its stages, and return the number by which the workers know them.

        Args:
            root: Module to which the names in the stages' calls refer.
            stages: All stages.
        """
        # 1. Find the layers that each process needs.
        count = len(self.commands.devices)
        layers_of_processes = []
        keys_of_processes = []
        for index in range(count):
            layers = _layers_of(stages[index::count], root)
            layers_of_processes.append(layers)
            keys_of_processes.append(self.placement.keys_of_layers(layers))

        # 2. Move their tensors. `placement.tensors` then stand for them in what is pickled.
        self.transfer.move(keys_of_processes)

        # 3. Send the layers and the calls.
        self._programs += 1
        for stage in range(self.commands.last):
            self._send_to(stage, stages[stage::count], layers_of_processes[stage])
        self.commands.messenger.flush()
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
        self.commands.send_command(
            stage,
            "load_stages",
            self._programs,
            specs,
            dumps(new_layers, self.placement.tensors),
            names,
            modes,
        )
        sent_layers.update(new_layers)
        modules = {name: layer for name, layer in new_layers.items() if isinstance(layer, nn.Module)}
        self._marks.append(LayerMarks(modules, contents=True))

    def check_layers(self) -> None:
        """Raise a StepError if a layer was changed after it was sent; see `LayerMarks`."""
        for marks in self._marks:
            marks.check()


def _layers_of(programs: Sequence[StageProgram], root: nn.Module) -> dict[str, Any]:
    layers: dict[str, Any] = {}
    for program in programs:
        layers |= used_parts(program, root)
    return layers
