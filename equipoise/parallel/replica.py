"""A copy of a module on another device that lasts as long as a run.

It has the structure of the module, parameters and buffers of its own, and shares every other attribute; attributes that
refer to the module, to parts of it or to its device refer to the copy's instead.
"""

import copy
import weakref
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from equipoise.parallel import foreach, internals

__all__ = ["Replica"]


class Replica:
    """A copy of a module on one device.

    Args:
        original: The module.
        device: Where the copy is.

    Attributes:
        module: The copy.
        parameters: The module's parameters, each with its copy.
        metrics: The module's metrics, each with its copy.
        trusted: Whether parameters that seem unchanged are.
    """

    def __init__(self, original: nn.Module, device: torch.device) -> None:
        self.device = device
        self.parameters: list[tuple[nn.Parameter, nn.Parameter]] = []
        self.metrics: list[tuple[Metric, Metric]] = []
        self._home = next((p.device for p in original.parameters()), torch.device("cpu"))
        self._copies: dict[int, Any] = {}  # by the identity of the original: modules, parameters, buffers, metrics
        self._shells: list[tuple[nn.Module, nn.Module]] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any], str]] = []
        with torch.inference_mode(False), torch.no_grad():
            self.module = self._copy(original)
        self._attributes = [self._private_attributes(*pair) for pair in self._shells]
        self._structure = self._present_structure()
        self._seen_buffers: list[Tensor] = []
        self._versions: tuple[int | None, int | None] = (None, None)
        self.trusted = False

    # Made once.

    def _copy(self, module: nn.Module) -> nn.Module:
        """The copy of a module and all below it, made once each."""
        made: nn.Module | None = self._copies.get(id(module))
        if made is not None:
            return made
        if isinstance(module, (Metric, MetricCollection)):
            return self._copy_metric(module)
        shell = self._copies[id(module)] = internals.shell_of(module)
        self._shells.append((module, shell))
        parameters, buffers = internals.parameters_of(shell), internals.buffers_of(shell)
        for name, parameter in internals.parameters_of(module).items():
            parameters[name] = None if parameter is None else self._copy_parameter(parameter)
        sources = internals.buffers_of(module)
        for name, buffer in sources.items():
            buffers[name] = None if buffer is None else self._copy_buffer(buffer)
            self._buffers += [(sources, buffers, name)] if buffer is not None else []
        for name, child in internals.children_of(module).items():
            internals.children_of(shell)[name] = None if child is None else self._copy(child)
        return shell

    def _copy_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        made: nn.Parameter | None = self._copies.get(id(parameter))
        if made is None:
            data = torch.empty_like(parameter, device=self.device).copy_(parameter)
            made = self._copies[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
            self.parameters.append((parameter, made))
        return made

    def _copy_buffer(self, buffer: Tensor) -> Tensor:
        made: Tensor | None = self._copies.get(id(buffer))
        if made is None:
            made = self._copies[id(buffer)] = torch.empty_like(buffer, device=self.device).copy_(buffer)
        return made

    def _copy_metric(self, module: nn.Module) -> nn.Module:
        """Metrics gather what they see in attributes, so copies share nothing."""
        made: nn.Module = copy.deepcopy(module).to(self.device)
        self._copies[id(module)] = made
        for source, other in zip(module.modules(), made.modules(), strict=True):
            if isinstance(source, Metric) and isinstance(other, Metric):
                self.metrics.append((source, other))
                internals.take_metric_state(other)
        return made

    def _private_attributes(
        self, source: nn.Module, target: nn.Module
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]:
        """A module's attributes, its copy's, what the copy keeps, and what of the module that stands for."""
        kept = {name: vars(target)[name] for name in internals.STRUCTURE}
        replaced = {}
        for name, value in vars(source).items():
            if name not in kept and (own := self._own(value)) is not value:
                kept[name], replaced[name] = own, value
        return vars(source), vars(target), kept, replaced

    def _own(self, value: Any) -> Any:
        """What stands in the copy for an attribute that refers to the module, to parts of it, or to its device."""
        if isinstance(value, (nn.Module, Tensor)):
            return self._copies.get(id(value), value)
        if isinstance(value, MethodType) and id(value.__self__) in self._copies:
            return MethodType(value.__func__, self._copies[id(value.__self__)])
        if isinstance(value, weakref.ref) and id(value()) in self._copies:
            return weakref.ref(self._copies[id(value())])
        if isinstance(value, torch.device):
            return self.device if value == self._home != self.device else value
        if type(value) in (list, tuple):
            items = [self._own(item) for item in value]
            return type(value)(items) if any(map(_differ, items, value)) else value
        if isinstance(value, dict):
            held = {key: self._own(item) for key, item in value.items()}
            return held if any(map(_differ, held.values(), value.values())) else value
        return value

    # Before every step.

    def _present_structure(self) -> list[list[int]]:
        return [
            [id(part) for name in ("_parameters", "_modules") for part in vars(source)[name].values()]
            for source, _ in self._shells
        ]

    def is_outdated(self) -> bool:
        """Whether parameters or modules have come or gone since the copy was made."""
        return self._structure != self._present_structure()

    def refresh_attributes(self) -> None:
        """Sets the copy's attributes to the module's."""
        for source, target, kept, replaced in self._attributes:
            for name, value in replaced.items():
                present = source.get(name)
                if present is not value or type(value) in (list, dict):
                    kept[name], replaced[name] = self._own(present), present
            target.clear()
            target.update(source)
            target.update(kept)
        for parameter, copied in self.parameters:
            if parameter.requires_grad is not copied.requires_grad:
                copied.requires_grad_(parameter.requires_grad)

    def has_stale_parameters(self) -> bool:
        """Whether the module's parameters have changed since this was asked last."""
        version = internals.versions([source for source, _ in self.parameters])
        stale = not self.trusted or version is None or version != self._versions[0]
        self.trusted, self._versions = True, (version, self._versions[1])
        return stale

    def has_stale_buffers(self) -> bool:
        """Whether buffers have changed, here or in the module, since this was asked last."""
        buffers = [tensor for sources, own, name in self._buffers for tensor in (sources[name], own[name])]
        version = internals.versions(buffers)
        same = len(buffers) == len(self._seen_buffers) and not any(map(_differ, buffers, self._seen_buffers))
        stale = version is None or version != self._versions[1] or not same
        self._seen_buffers, self._versions = buffers, (self._versions[0], version)
        return stale

    def load_parameters(self, tensors: Sequence[Tensor]) -> None:
        """Copies values into the parameters."""
        foreach.copy_([copied for _, copied in self.parameters], list(tensors))

    def buffers(self) -> list[Tensor]:
        """The module's buffers."""
        return [sources[name] for sources, _, name in self._buffers]

    def load_buffers(self, tensors: Sequence[Tensor]) -> None:
        """Copies values into the buffers, without a trace in the graphs that use them."""
        for (_, own, name), tensor in zip(self._buffers, tensors, strict=True):
            if own[name].shape != tensor.shape or own[name].dtype != tensor.dtype:
                own[name] = torch.empty_like(tensor, device=self.device)
        foreach.copy_([own[name].data for _, own, name in self._buffers], [tensor.data for tensor in tensors])

    def give_back(self) -> None:
        """Makes the module's buffers and attributes those of the copy, which computed in the module's place."""
        sources, own = self.buffers(), [own[name] for _, own, name in self._buffers]
        foreach.copy_([source.data for source in sources], [buffer.data for buffer in own])
        for source, target, kept, _ in self._attributes:
            source.update({name: value for name, value in target.items() if name not in kept})


def _differ(one: object, other: object) -> bool:
    return one is not other
