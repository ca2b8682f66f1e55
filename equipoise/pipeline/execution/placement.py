"""Placement of the parts of a network on their devices, and the way back."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from equipoise.errors import ConfigurationError
from equipoise.pipeline.execution.tied_copies import TiedCopies
from equipoise.pipeline.graph.call_names import owners
from equipoise.pipeline.graph.tracing import Traced

__all__ = ["Placement", "move"]


class Placement:
    """The homes of a module's parts.

    What no stage has goes to the last device, where batches are and losses are computed.

    Args:
        module: The user's module.
        devices: One for each stage.
        stages_per_device: How many stages each device has. Default: 1.
        copy_always: Give every device a copy of what an earlier one has, even if both are the same.
        in_processes: Whether other processes have the stages but the last, and take what is theirs by themselves.
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Sequence[torch.device],
        *,
        stages_per_device: int = 1,
        copy_always: bool = False,
        in_processes: bool = False,
    ) -> None:
        self.module, self.devices, self.copy_always = module, devices, copy_always
        self._count = len(devices) // stages_per_device
        self.in_processes = in_processes
        self.shadows = TiedCopies()
        self._homes: dict[int, int] = {}  # of a module's or tensor's id its stage
        self._waiting: list[RemovableHandle] = []
        self._settled: set[int] = set()
        self.placed = False

    def place_outside(self, network: nn.Module | None) -> None:
        """Lets what does not belong to the network come to the last device: metrics at once, layers when called.

        Which layers belong to it shows when it is called; what the user calls before does not.

        Args:
            network: What belongs to it in any case; None if there is nothing.
        """
        inside = {id(part) for part in ([] if network is None else network.modules())}
        for part in self.module.modules():
            if isinstance(part, Metric):
                part.to(self.devices[-1])
        if len(set(self.devices)) == 1 and not self.in_processes:
            return
        for tensor in [*self.module.parameters(recurse=False), *self.module.buffers(recurse=False)]:
            move(tensor, self.devices[-1])
        for part in self.module.modules():
            if id(part) not in inside and part is not self.module:
                self._waiting.append(part.register_forward_pre_hook(partial(_fetch, device=self.devices[-1])))

    def stop_waiting(self) -> None:
        """The network was called, or the run has ended."""
        for handle in self._waiting:
            handle.remove()
        self._waiting.clear()

    def place(self, network: nn.Module, traced: Traced, ends: Sequence[int]) -> list[int]:
        """Moves everything to its place.

        Args:
            network: The network.
            traced: Its forward.
            ends: For each stage the index of the call after its last.

        Returns:
            For each stage the bytes of its parameters and buffers.
        """
        self.stop_waiting()
        first, sizes = 0, [0] * len(ends)
        placed: set[int] = set()

        def settle(tensors: Collection[Tensor], stage: int) -> None:
            for tensor in tensors:
                if id(tensor) not in placed:
                    placed.add(id(tensor))
                    self._homes[id(tensor)] = stage
                    if stage % self._count == self._count - 1 or not self.in_processes:
                        move(tensor, self.devices[stage])
                    sizes[stage] += tensor.nbytes

        called = owners(traced)
        for stage, end in enumerate(ends):
            for name in (name for names in called[first:end] for name in names):
                part = find(network, name)
                self._homes.setdefault(id(part), stage)
                settle(_tensors_of(part), stage)
            first = end
        settle([*self.module.parameters(), *self.module.buffers()], len(ends) - 1)
        for part in self.module.modules():
            if isinstance(part, nn.RNNBase):
                part.flatten_parameters()  # for cuDNN, which wants them in one piece
        self.placed = True
        return sizes

    def stage_of(self, network: nn.Module) -> Callable[[str], int | None]:
        """For the name of a part of the network its stage; None where it lies nowhere in particular."""

        def stage(name: str) -> int | None:
            part = find(network, name)
            if (home := self._homes.get(id(part))) is not None:
                return home
            homes = [self._homes[id(tensor)] for tensor in _tensors_of(part) if id(tensor) in self._homes]
            return min(homes) if homes else None

        return stage

    def shadow(self, traced: Traced) -> Callable[[int, fx.Node], nn.Module | None]:
        """For a stage and a call the copy of a layer that the stage needs, since the layer lies elsewhere."""

        def shadow(stage: int, node: fx.Node) -> nn.Module | None:
            if self.in_processes or node.op not in ("call_module", "get_attr"):
                return None
            part = find(traced.root, str(node.target))
            tensors, device = _tensors_of(part), self.devices[stage]
            own = stage % self._count
            homes = {self._homes.get(id(tensor), stage) % self._count for tensor in tensors} - {own}
            if not homes or not (self.copy_always or any(self.devices[home] != device for home in homes)):
                return None
            return self.shadows.of(part, own, device, str(node.target).removeprefix("network."))

        return shadow

    def settle_optimizer(self, optimizer: Optimizer) -> None:
        """Lets an optimiser's state follow the parameters, which were placed after it was made or loaded.

        Raises:
            ConfigurationError: If the optimiser computes with all parameters at once.
        """
        if not self.placed or id(optimizer) in self._settled:
            return
        self._settled.add(id(optimizer))
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if isinstance(optimizer, LBFGS) and len({parameter.device for parameter in parameters}) > 1:
            raise ConfigurationError(
                "LBFGS computes with all parameters as one vector, but strategy='pipeline' lays them on several"
                " devices. Take another optimiser."
            )
        for parameter in parameters:
            state: dict[str, Any] = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":  # which stays with the host, or was put right by torch
                    state[key] = value.to(parameter.device)


def move(tensor: Tensor, device: torch.device) -> None:
    """Brings a parameter or buffer to a device, with its gradient; it stays the same object."""
    if tensor.device == device:
        return
    with torch.inference_mode(False), torch.no_grad():
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is not None:
            tensor.grad = None
        tensor.data = tensor.data.to(device)
        if gradient is not None:
            tensor.grad = gradient.to(device)


def _fetch(part: nn.Module, args: Any, *, device: torch.device) -> None:
    for tensor in [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
        move(tensor, device)


def find(network: nn.Module, name: str) -> Any:
    """A submodule or a tensor by its name."""
    part: Any = network
    for own in filter(None, name.split(".")):
        part = getattr(part, own)
    return part


def _tensors_of(part: Any) -> list[Tensor]:
    if isinstance(part, nn.Module):
        return [*part.parameters(), *part.buffers()]
    return [part] if isinstance(part, Tensor) else []
