"""Placement of the parts of a network on their devices."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from equipoise.errors import ConfigurationError
from equipoise.extensions.pipeline.execution.tied_copies import TiedCopies
from equipoise.extensions.pipeline.graph.call_names import owner_of
from equipoise.extensions.pipeline.graph.stage_spec import find_part, parameters_and_buffers
from equipoise.extensions.pipeline.graph.traced import Traced
from equipoise.interop.lightning.callbacks import copies_of
from equipoise.parallel.device_work import note_placed
from equipoise.parallel.optimizer_parameters import optimizer_parameters

__all__ = ["Placement", "move"]


class Placement:
    """Stages of a module's parts, and the devices on which they lie.

    What no stage uses lies on the last device, to which batches come and where losses are computed.

    Args:
        module: The user's module.
        devices: A device for each stage.
        stages_per_device: Number of stages on each device. Default: 1.
        in_processes: Whether workers have the stages but the last, and take their parts by themselves. Default: False.

    Attributes:
        placed: True after `place`.
        tied_copies: Copies of layers that several devices use.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        stages_per_device: int = 1,
        in_processes: bool = False,
    ) -> None:
        self.module = module
        self.devices = devices
        self.in_processes = in_processes
        self.tied_copies = TiedCopies()
        self.placed = False
        self._num_devices = len(devices) // stages_per_device
        # The stage of each submodule and tensor, by identity. The tensors are kept: a forward may replace a buffer, and
        # a new tensor with the identity of the old one would be taken for it.
        self._stages: dict[int, int] = {}
        self._placed_tensors: list[Tensor] = []
        self._hooks: list[RemovableHandle] = []
        self._settled_optimizers: set[int] = set()

    # Before the network is called.

    def place_outside(self, network: nn.Module | None) -> None:
        """Place what does not belong to the network on the last device: metrics now, layers when they are called.

        The first call shows which layers belong to the network; a layer that the user calls before does not.

        Args:
            network: Module whose layers certainly belong to it; None if there is none.
        """
        # 1. Move metrics.
        last_device = self.devices[-1]
        for submodule in self.module.modules():
            if isinstance(submodule, Metric):
                submodule.to(last_device)
        different_devices = set(self.devices)
        if len(different_devices) == 1 and not self.in_processes:
            return

        # 2. Move the tensors of the module itself.
        for tensor in _direct_tensors(self.module):
            move(tensor, last_device)

        # 3. Move layers outside the network when they are called.
        inside = {id(self.module)}
        if network is not None:
            inside.update(map(id, network.modules()))
        for submodule in self.module.modules():
            if id(submodule) not in inside:
                move_layer = partial(_move_layer, device=last_device)
                self._hooks.append(submodule.register_forward_pre_hook(move_layer))

    def stop_waiting(self) -> None:
        """Let layers stay where they are from now on: the network was called, or the run has ended."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # Placement.

    def place(self, network: nn.Module, traced: Traced, ends: Sequence[int]) -> list[int]:
        """Move everything to its device.

        Args:
            network: The network.
            traced: Its forward.
            ends: For each stage the index of the call after its last.

        Returns:
            For each stage the bytes of its parameters and buffers.
        """
        # A layer lies with the first stage that calls it.
        names = [owner_of(node) for node in traced.calls]
        parts_of_stages = []
        begin = 0
        for end in ends:
            parts_of_stages.append([find_part(network, name) for name in names[begin:end] if name is not None])
            begin = end
        return self.place_parts(parts_of_stages)

    def place_parts(self, parts_of_stages: Sequence[Sequence[Any]]) -> list[int]:
        """Move everything to its device.

        Args:
            parts_of_stages: For each stage its layers and tensors. A part of several stages lies with the first.

        Returns:
            For each stage the bytes of its parameters and buffers.
        """
        self.stop_waiting()
        last_stage = len(parts_of_stages) - 1
        sizes = [0] * len(parts_of_stages)

        # 1. Parts lie with their stages.
        placed: set[int] = set()
        for stage, parts in enumerate(parts_of_stages):
            for part in parts:
                self._stages.setdefault(id(part), stage)
                sizes[stage] += self._place_tensors(parameters_and_buffers(part), stage, placed)

        # 2. Everything else lies with the last stage.
        sizes[last_stage] += self._place_tensors(parameters_and_buffers(self.module), last_stage, placed)

        # 3. cuDNN needs the weights of a recurrent layer in one piece.
        for submodule in self.module.modules():
            if isinstance(submodule, nn.RNNBase):
                submodule.flatten_parameters()

        # 4. Tensors of copies, such as averages of the weights, lie beside those of the module.
        if not self.in_processes:
            for copied in copies_of(self.module):
                self._place_copy(copied)
        self.placed = True
        return sizes

    def _place_tensors(
        self,
        tensors: Collection[Tensor],
        stage: int,
        placed: set[int],
    ) -> int:
        """Move tensors that are not placed yet to the device of a stage, and return their bytes."""
        # Under `in_processes`, this process has the last stage of every round.
        last_index = self._num_devices - 1
        is_here = not self.in_processes or self._device_index(stage) == last_index
        size = 0
        for tensor in tensors:
            if id(tensor) in placed:
                continue
            placed.add(id(tensor))
            self._stages[id(tensor)] = stage
            self._placed_tensors.append(tensor)
            if is_here:
                move(tensor, self.devices[stage])
                note_placed(tensor, self._device_index(stage))
            size += tensor.nbytes
        return size

    def _place_copy(self, copied: nn.Module) -> None:
        """Move the tensors of a copy to those of the module, unless they lie on the host on purpose."""
        for tensor, of_copy in zip(
            (*self.module.parameters(), *self.module.buffers()), (*copied.parameters(), *copied.buffers()), strict=True
        ):
            if of_copy.device == self.devices[-1]:
                move(of_copy, tensor.device)

    def _device_index(self, stage: int) -> int:
        return stage % self._num_devices

    # After placement.

    def stage_of(self, network: nn.Module) -> Callable[[str], int | None]:
        """Return a function that returns the stage of a part by its name; None if the part belongs to no stage."""

        def stage(name: str) -> int | None:
            part = find_part(network, name)
            stage_of_part = self._stages.get(id(part))
            if stage_of_part is not None:
                return stage_of_part
            # A part that no call names lies with the first stage that has one of its tensors.
            stages = []
            for tensor in parameters_and_buffers(part):
                stage_of_tensor = self._stages.get(id(tensor))
                if stage_of_tensor is not None:
                    stages.append(stage_of_tensor)
            return min(stages, default=None)

        return stage

    def tied_copy(self, traced: Traced) -> Callable[[int, fx.Node], nn.Module | None]:
        """Return a function for `make_stages` that returns the copy of a layer which lies on another device."""

        def copy_for(stage: int, node: fx.Node) -> nn.Module | None:
            # Each process receives the layers that it uses.
            if self.in_processes:
                return None
            if node.op not in ("call_module", "get_attr"):
                return None
            name = str(node.target)
            part = find_part(traced.root, name)
            if not self._needs_copy(stage, part):
                return None
            return self.tied_copies.copy_of(
                part,
                self._device_index(stage),
                self.devices[stage],
                name.removeprefix("network."),
            )

        return copy_for

    def _needs_copy(self, stage: int, part: Any) -> bool:
        """Return True if a part lies with a stage of another device."""
        own_index = self._device_index(stage)
        for tensor in parameters_and_buffers(part):
            index = self._device_index(self._stages.get(id(tensor), stage))
            if index != own_index and self._are_apart(stage, index):
                return True
        return False

    def _are_apart(self, stage: int, other: int) -> bool:
        return self.devices[stage] != self.devices[other]

    def settle_optimizer(self, optimizer: Optimizer) -> None:
        """Move an optimiser's state to its parameters, which were placed after it was built or loaded.

        Raises:
            ConfigurationError: If the optimiser computes with all parameters together.
        """
        if not self.placed or id(optimizer) in self._settled_optimizers:
            return
        self._settled_optimizers.add(id(optimizer))
        parameters = optimizer_parameters(optimizer)
        devices = {parameter.device for parameter in parameters}
        if isinstance(optimizer, LBFGS) and len(devices) > 1:
            raise ConfigurationError(
                "LBFGS computes with all parameters as one vector, but strategy='pipeline' lays them on several"
                " devices. Take another optimiser."
            )
        for parameter in parameters:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for name, value in state.items():
                # torch itself decides where a step count lies.
                if isinstance(value, Tensor) and name != "step":
                    state[name] = value.to(parameter.device)


def move(tensor: Tensor, device: torch.device) -> None:
    """Move a parameter or buffer with its gradient; it stays the same object.

    Args:
        tensor: The parameter or buffer.
        device: Its new device.
    """
    if tensor.device == device:
        return
    with torch.inference_mode(False), torch.no_grad():
        gradient = tensor.grad if tensor.is_leaf else None
        # torch refuses values and gradients on different devices.
        if gradient is not None:
            tensor.grad = None
        tensor.data = tensor.data.to(device)
        if gradient is not None:
            tensor.grad = gradient.to(device)


def _move_layer(layer: nn.Module, args: Any, *, device: torch.device) -> None:
    """Move a layer before its call, apart from its submodules."""
    for tensor in _direct_tensors(layer):
        move(tensor, device)


def _direct_tensors(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module, apart from those of its submodules."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
