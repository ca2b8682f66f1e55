"""A copy of a module on another device: the same structure, with parameters, buffers and metrics of its own.

The copy is built once. All other attributes are shared with the module; `ModuleCopy.substitute` translates those that
refer to the module, to parts of it or to its device.
"""

import copy
import weakref
from collections.abc import Collection, Sequence
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from equipoise.interop.metrics import take_metric_state
from equipoise.interop.torch.modules import (
    buffers_of,
    children_of,
    parameters_of,
    shell_of,
)
from equipoise.tree import rebuild

__all__ = ["BufferSlot", "ModuleCopy"]

# An object of the module, and its copy.
ModulePair = tuple[nn.Module, nn.Module]
ParameterPair = tuple[nn.Parameter, nn.Parameter]
MetricPair = tuple[Metric, Metric]

# A dictionary of a module's parameters or buffers.
Registered = dict[str, Any]
# The dictionary of the module, the dictionary of its copy, and the name of the buffer in both.
BufferSlot = tuple[Registered, Registered, str]
# The dictionary of the copy, the name in it, and the module's parameter.
ParameterSlot = tuple[Registered, str, nn.Parameter]


class ModuleCopy:
    """Copies a module to a device.

    Args:
        original: The module.
        device: The device of the copy.

    Attributes:
        module: The copy.
        parameters: The module's parameters, each with its copy.
        metrics: The module's metrics, each with its copy.
        shells: The module and all below it, each with its copy, but not metrics.
        buffers: Every occurrence of a buffer.
        parameter_slots: Every occurrence of a parameter.
    """

    def __init__(
        self,
        original: nn.Module,
        device: torch.device,
    ) -> None:
        self.device = device
        self.parameters: list[ParameterPair] = []
        self.metrics: list[MetricPair] = []
        self.shells: list[ModulePair] = []
        self.buffers: list[BufferSlot] = []
        self.parameter_slots: list[ParameterSlot] = []
        self._original_device = _device_of(original)
        # Copies of modules, parameters, buffers and metrics, by the identity of the original.
        self._copies: dict[int, Any] = {}
        # The copies are ordinary tensors, also if the module is copied within inference mode.
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            self.module = self._copy(original)

    def substitute(self, value: Any) -> Any:
        """Return the copy's value for an attribute of the module.

        The value differs if it refers to the module, to parts of it or to its device. Otherwise it is the same object.
        """
        if isinstance(value, (nn.Module, Tensor)):
            return self._copies.get(id(value), value)
        if isinstance(value, MethodType):
            return self._substitute_method(value)
        if isinstance(value, weakref.ref):
            return self._substitute_reference(value)
        if isinstance(value, torch.device):
            return self._substitute_device(value)
        if type(value) in (list, tuple):
            return self._substitute_items(value, value)
        if isinstance(value, dict):
            return self._substitute_items(value, value.values())
        return value

    def _substitute_items(self, container: Any, items: Collection[Any]) -> Any:
        """Return the container itself if none of its items differs."""
        substitutes = [self.substitute(item) for item in items]
        is_unchanged = all(map(is_, substitutes, items))
        if is_unchanged:
            return container
        return rebuild(container, substitutes)

    def _substitute_device(self, device: torch.device) -> torch.device:
        if device != self._original_device:
            return device
        # The same object remains where both devices are equal.
        if device == self.device:
            return device
        return self.device

    def _substitute_method(self, method: MethodType) -> MethodType:
        owner = id(method.__self__)
        if owner not in self._copies:
            return method
        function = method.__func__
        copied = self._copies[owner]
        return MethodType(function, copied)

    def _substitute_reference(self, reference: "weakref.ref[Any]") -> "weakref.ref[Any]":
        referent = id(reference())
        if referent not in self._copies:
            return reference
        copied = self._copies[referent]
        return weakref.ref(copied)

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Register other tensors in place of the copies of parameters.

        Args:
            tensors: A tensor for each of `parameters`, in order.
        """
        pairs = zip(self.parameters, tensors, strict=True)
        for (source, _), tensor in pairs:
            self._copies[id(source)] = tensor
        for registered, name, source in self.parameter_slots:
            tensor = self._copies[id(source)]
            registered[name] = tensor

    def _copy(self, module: nn.Module) -> nn.Module:
        """Copy a module and all below it. A module that occurs twice is copied once."""
        key = id(module)
        existing: nn.Module | None = self._copies.get(key)
        if existing is not None:
            return existing
        if isinstance(module, (Metric, MetricCollection)):
            return self._copy_metric(module)

        # 1. An empty module, which is known before its children are copied: they may refer to it.
        shell = shell_of(module)
        self._copies[key] = shell
        pair = (module, shell)
        self.shells.append(pair)

        # 2. What it holds.
        self._copy_parameters(module, shell)
        self._copy_buffers(module, shell)
        self._copy_children(module, shell)
        return shell

    # Registered parameters, buffers and children may be None.

    def _copy_parameters(self, module: nn.Module, shell: nn.Module) -> None:
        sources = parameters_of(module)
        copies = parameters_of(shell)
        for name, parameter in sources.items():
            if parameter is None:
                copies[name] = None
                continue
            copied = self._copy_parameter(parameter)
            copies[name] = copied
            slot = (copies, name, parameter)
            self.parameter_slots.append(slot)

    def _copy_buffers(self, module: nn.Module, shell: nn.Module) -> None:
        sources = buffers_of(module)
        copies = buffers_of(shell)
        for name, buffer in sources.items():
            if buffer is None:
                copies[name] = None
                continue
            copied = self._copy_buffer(buffer)
            copies[name] = copied
            slot = (sources, copies, name)
            self.buffers.append(slot)

    def _copy_children(self, module: nn.Module, shell: nn.Module) -> None:
        sources = children_of(module)
        copies = children_of(shell)
        for name, child in sources.items():
            if child is None:
                copies[name] = None
                continue
            copied = self._copy(child)
            copies[name] = copied

    def _copy_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        key = id(parameter)
        existing: nn.Parameter | None = self._copies.get(key)
        if existing is not None:
            return existing
        data = torch.empty_like(parameter, device=self.device)
        data.copy_(parameter)
        requires_grad = parameter.requires_grad
        copied = nn.Parameter(data, requires_grad=requires_grad)
        self._copies[key] = copied
        pair = (parameter, copied)
        self.parameters.append(pair)
        return copied

    def _copy_buffer(self, buffer: Tensor) -> Tensor:
        key = id(buffer)
        existing: Tensor | None = self._copies.get(key)
        if existing is not None:
            return existing
        copied = torch.empty_like(buffer, device=self.device)
        copied.copy_(buffer)
        self._copies[key] = copied
        return copied

    def _copy_metric(self, module: nn.Module) -> nn.Module:
        """Copy a metric or a collection of metrics. They gather values in attributes, so copies share nothing."""
        # 1. Copy it. The memo holds the copies of parts that were copied before.
        memo = dict(self._copies)
        copied = copy.deepcopy(module, memo)
        copied = copied.to(self.device)

        # 2. Note the copies of all its parts.
        pairs = zip(module.modules(), copied.modules(), strict=True)
        for source, target in pairs:
            key = id(source)
            is_new = key not in self._copies
            if is_new:
                self._note_metric(source, target)
            self._copies[key] = target
        return copied

    def _note_metric(self, source: nn.Module, target: nn.Module) -> None:
        """Note a metric and its copy, whose state becomes its own; other modules are no metrics."""
        if not isinstance(source, Metric):
            return
        if not isinstance(target, Metric):
            return
        pair = (source, target)
        self.metrics.append(pair)
        take_metric_state(target)


def _device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter, or the CPU."""
    parameter = next(module.parameters(), None)
    if parameter is None:
        return torch.device("cpu")
    return parameter.device
