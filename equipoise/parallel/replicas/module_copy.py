"""A copy of a module on another device: the same structure, with parameters, buffers and metrics of its own.

The copy is built once. All other attributes are shared with the module; `ModuleCopy.substitute` translates those that
refer to the module, to parts of it or to its device.
"""

import copy
import weakref
from collections.abc import Callable, Collection, Sequence
from operator import is_
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from equipoise.interop.metrics import take_metric_state
from equipoise.interop.torch.modules import buffers_of, children_of, parameters_of, shell_of
from equipoise.tree import rebuild

__all__ = ["BufferSlot", "ModuleCopy", "Registered"]

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
            if value == self._original_device and value != self.device:
                return self.device
            return value
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
        """Copy a module and all below it."""
        if isinstance(module, (Metric, MetricCollection)):
            return self._copy_metric(module)

        # 1. An empty module, which is known before its children are copied: they may refer to it.
        shell = shell_of(module)
        self._copies[id(module)] = shell
        self.shells.append((module, shell))

        # 2. Its parameters, buffers and submodules.
        parameters = parameters_of(module)
        parameter_copies = parameters_of(shell)
        self._copy_entries(parameters, parameter_copies, self._copy_parameter)
        buffers = buffers_of(module)
        buffer_copies = buffers_of(shell)
        self._copy_entries(buffers, buffer_copies, self._on_device)
        self._copy_entries(children_of(module), children_of(shell), self._copy)

        # 3. Note each occurrence of a parameter or buffer.
        for name, parameter in parameters.items():
            if parameter is not None:
                self.parameter_slots.append((parameter_copies, name, parameter))
        for name, buffer in buffers.items():
            if buffer is not None:
                self.buffers.append((buffers, buffer_copies, name))
        return shell

    def _copy_entries(self, sources: Registered, copies: Registered, make: Callable[[Any], Any]) -> None:
        """Copy the entries of a module's dictionary under their names, each object once. An entry may be None."""
        for name, item in sources.items():
            if item is None:
                copies[name] = None
                continue
            if id(item) not in self._copies:
                self._copies[id(item)] = make(item)
            copies[name] = self._copies[id(item)]

    def _copy_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        copied = nn.Parameter(self._on_device(parameter), requires_grad=parameter.requires_grad)
        self.parameters.append((parameter, copied))
        return copied

    def _on_device(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=self.device).copy_(tensor)

    def _copy_metric(self, module: nn.Module) -> nn.Module:
        """Copy a metric or a collection of metrics. They gather values in attributes, so copies share nothing."""
        # 1. Copy it. The memo holds the copies of parts that were copied before.
        memo = dict(self._copies)
        copied = copy.deepcopy(module, memo).to(self.device)

        # 2. Note the copies of all its parts. The state of a metric's copy is its own.
        for source, target in zip(module.modules(), copied.modules(), strict=True):
            is_new = id(source) not in self._copies
            if is_new and isinstance(source, Metric) and isinstance(target, Metric):
                self.metrics.append((source, target))
                take_metric_state(target)
            self._copies[id(source)] = target
        return copied


def _device_of(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter, or the CPU."""
    parameter = next(module.parameters(), None)
    if parameter is None:
        return torch.device("cpu")
    return parameter.device
