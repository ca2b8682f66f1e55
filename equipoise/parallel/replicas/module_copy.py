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
from equipoise.interop.torch.modules import buffers_of, children_of, parameters_of, shell_of
from equipoise.tree import rebuild

__all__ = ["BufferSlot", "ModuleCopy"]

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

    def __init__(self, original: nn.Module, device: torch.device) -> None:
        self.device = device
        self.parameters: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.metrics: list[tuple[Metric, Metric]] = []
        self.shells: list[tuple[nn.Module, nn.Module]] = []
        self.buffers: list[BufferSlot] = []
        self.parameter_slots: list[ParameterSlot] = []
        self._original_device = _device_of(original)
        # Copies of modules, parameters, buffers and metrics, by the identity of the original.
        self._copies: dict[int, Any] = {}
        # The copies are ordinary tensors, also if the module is copied within inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.module = self._copy(original)

    def substitute(self, value: Any) -> Any:
        """Return the copy's value for an attribute of the module.

        The value differs if it refers to the module, to parts of it or to its device. Otherwise it is the same object.
        """
        if isinstance(value, (nn.Module, Tensor)):
            return self._copies.get(id(value), value)
        if isinstance(value, MethodType):
            owner = self._copies.get(id(value.__self__))
            if owner is None:
                return value
            return MethodType(value.__func__, owner)
        if isinstance(value, weakref.ref):
            referent = self._copies.get(id(value()))
            if referent is None:
                return value
            return weakref.ref(referent)
        if isinstance(value, torch.device):
            # The same object remains where both devices are equal.
            is_replaced = value == self._original_device and value != self.device
            return self.device if is_replaced else value
        if type(value) in (list, tuple):
            return self._substitute_items(value, value)
        if isinstance(value, dict):
            return self._substitute_items(value, value.values())
        return value

    def _substitute_items(self, container: Any, items: Collection[Any]) -> Any:
        """Return the container itself if none of its items differs."""
        substitutes = [self.substitute(item) for item in items]
        if all(map(is_, substitutes, items)):
            return container
        return rebuild(container, substitutes)

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Register other tensors in place of the copies of parameters.

        Args:
            tensors: A tensor for each of `parameters`, in order.
        """
        for (source, _), tensor in zip(self.parameters, tensors, strict=True):
            self._copies[id(source)] = tensor
        for registered, name, source in self.parameter_slots:
            registered[name] = self._copies[id(source)]

    def _copy(self, module: nn.Module) -> nn.Module:
        """Copy a module and all below it. A module that occurs twice is copied once."""
        existing: nn.Module | None = self._copies.get(id(module))
        if existing is not None:
            return existing
        if isinstance(module, (Metric, MetricCollection)):
            return self._copy_metric(module)

        # 1. An empty module, which is known before its children are copied: they may refer to it.
        shell = shell_of(module)
        self._copies[id(module)] = shell
        self.shells.append((module, shell))

        # 2. What it holds. Registered parameters, buffers and children may be None.
        parameters = parameters_of(shell)
        for name, parameter in parameters_of(module).items():
            parameters[name] = None
            if parameter is not None:
                parameters[name] = self._copy_parameter(parameter)
                self.parameter_slots.append((parameters, name, parameter))
        sources = buffers_of(module)
        buffers = buffers_of(shell)
        for name, buffer in sources.items():
            buffers[name] = None
            if buffer is not None:
                buffers[name] = self._copy_buffer(buffer)
                self.buffers.append((sources, buffers, name))
        children = children_of(shell)
        for name, child in children_of(module).items():
            children[name] = None
            if child is not None:
                children[name] = self._copy(child)
        return shell

    def _copy_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        existing: nn.Parameter | None = self._copies.get(id(parameter))
        if existing is not None:
            return existing
        data = torch.empty_like(parameter, device=self.device)
        data.copy_(parameter)
        copied = nn.Parameter(data, requires_grad=parameter.requires_grad)
        self._copies[id(parameter)] = copied
        self.parameters.append((parameter, copied))
        return copied

    def _copy_buffer(self, buffer: Tensor) -> Tensor:
        existing: Tensor | None = self._copies.get(id(buffer))
        if existing is not None:
            return existing
        copied = torch.empty_like(buffer, device=self.device)
        copied.copy_(buffer)
        self._copies[id(buffer)] = copied
        return copied

    def _copy_metric(self, module: nn.Module) -> nn.Module:
        """Copy a metric or a collection of metrics. They gather values in attributes, so copies share nothing."""
        # 1. Copy it. The memo holds the copies of parts that were copied before.
        copied = copy.deepcopy(module, dict(self._copies)).to(self.device)

        # 2. Note the copies of all its parts. The state of a metric becomes the copy's own.
        for source, target in zip(module.modules(), copied.modules(), strict=True):
            is_new = id(source) not in self._copies
            self._copies[id(source)] = target
            if is_new and isinstance(source, Metric) and isinstance(target, Metric):
                self.metrics.append((source, target))
                take_metric_state(target)
        return copied


def _device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter, or the CPU."""
    parameter = next(module.parameters(), None)
    if parameter is None:
        return torch.device("cpu")
    return parameter.device
