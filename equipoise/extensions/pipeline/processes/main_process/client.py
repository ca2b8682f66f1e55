"""The workers of a pipeline, as the main process uses them.

Each worker holds the parameters and buffers that its stages use. The main process records who has which tensor, moves
their values, sends stages, and commands the steps. A parameter that several stages use lies in each of their processes.
Their gradients are summed before the optimisers step, so the optimisers do the same everywhere.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from equipoise.extensions.pipeline.messaging.messages import Messenger
from equipoise.extensions.pipeline.processes.main_process.stage_sender import StageSender
from equipoise.extensions.pipeline.processes.main_process.step_seeds import StepSeeds
from equipoise.extensions.pipeline.processes.main_process.tensor_placement import TensorPlacement
from equipoise.extensions.pipeline.processes.main_process.tensor_transfer import TensorTransfer
from equipoise.extensions.pipeline.processes.main_process.worker_commands import WorkerCommands

__all__ = ["StageClient"]


class StageClient:
    """The workers, and what they have of a module.

    Args:
        messenger: Connection to the workers.
        devices: The device of each process, in the order of their first stages; the last is the main process's.
        replica: Number of this replica of the pipeline. Default: 0.

    Attributes:
        commands: Commands to the workers, and their failures.
        seeds: Seeds of the stages' random numbers.
        placement: The processes that have each tensor of the module, from `begin` on.
        transfer: Moves the values of these tensors, from `begin` on.
        stages: Sends stages of the module, from `begin` on.
    """

    placement: TensorPlacement
    transfer: TensorTransfer
    stages: StageSender

    def __init__(self, messenger: Messenger, devices: Sequence[torch.device], replica: int = 0) -> None:
        self.commands = WorkerCommands(messenger, devices)
        self.seeds = StepSeeds(replica)

    def begin(self, module: nn.Module, before_move: Callable[[], None]) -> None:
        """Begin with a module, all of which is still in this process.

        Args:
            module: The module.
            before_move: Called before tensors move to a process that does not have them.
        """
        commands = self.commands
        placement = TensorPlacement(module, commands.last)
        transfer = TensorTransfer(commands, placement, before_move)
        self.placement = placement
        self.transfer = transfer
        self.stages = StageSender(commands, placement, transfer, module)
        commands.send_to_all("begin", placement.specs())

    def end(self) -> None:
        """Let the workers drop the module, all of which is in this process again."""
        self.commands.send_to_all("begin", [])
        self.commands.messenger.flush()
        self.placement.clear()
