"""One replica: a copy of a module on another device that lasts as long as a run.

It has the structure of the module, parameters and buffers of its own, and shares every other attribute; attributes that
refer to the module, to parts of it or to its device refer to the copy's instead.
"""

import copy
import weakref
from collections.abc import Sequence
from itertools import chain
from operator import is_
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from equipoise.interop.metrics import take_metric_state
from equipoise.interop.torch import foreach
from equipoise.interop.torch.modules import STRUCTURE, buffers_of, children_of, parameters_of, shell_of, versions
from equipoise.parallel.batches.splitting import rebuild

__all__ = ["Replica"]


_PLAIN = (bool, int, float, str, tuple, dict, list, set, torch.dtype, type(None))


class _Attributes(NamedTuple):
    """The attributes of a module and of its copy.

    Attributes:
        source, target: The module's and the copy's.
        kept: What the copy has instead of the module's.
        replaced: What of the module that stands for.
        seen: The module's, when the last two were made.
        containers: Its dictionaries and lists, which may have come to hold something since.
        lengths: Theirs; empty where all of them are.
        is_plain: Whether it is one of torch's own whose attributes are numbers and the like: what refers to a module
            would be a new attribute.
    """

    source: dict[str, Any]
    target: dict[str, Any]
    kept: dict[str, Any]
    replaced: dict[str, Any]
    seen: list[Any]
    containers: list[Any]
    lengths: list[int]
    is_plain: bool


class _Structure(NamedTuple):
    """What a module consists of.

    Attributes:
        registered: The dictionaries of parameters and children of all its parts.
        objects: What they held.
        lengths: How much each of them held.
        buffers: The dictionaries of buffers.
        held: The names of those that were there; None where no part has any.
    """

    registered: list[dict[str, Any]]
    objects: list[Any]
    lengths: list[int]
    buffers: list[dict[str, Tensor | None]]
    held: list[str] | None


def _held(buffers: list[dict[str, Tensor | None]]) -> list[str]:
    return [name for each in buffers for name, buffer in each.items() if buffer is not None]


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
        self._learned: list[bool] = []
        self._home = next((p.device for p in original.parameters()), torch.device("cpu"))
        self._copies: dict[int, Any] = {}  # by the identity of the original: modules, parameters, buffers, metrics
        self._shells: list[tuple[nn.Module, nn.Module]] = []
        self._buffers: list[tuple[dict[str, Any], dict[str, Any], str]] = []
        self._slots: list[tuple[dict[str, Any], str, nn.Parameter]] = []  # where parameters are found
        with torch.inference_mode(False), torch.no_grad():
            self.module = self._copy(original)
        self._attributes = [
            self._private_attributes(type(source), vars(source), vars(shell)) for source, shell in self._shells
        ]
        self.refresh_attributes()
        for _, shell in self._shells:
            if isinstance(shell, nn.RNNBase):
                shell.flatten_parameters()  # for cuDNN; values copied into them later leave them so
        self._structure = self._present_structure()
        self._seen_buffers: list[Tensor] = []
        self._versions: tuple[list[int] | None, list[int] | None] = (None, None)
        self._changed: list[bool] | None = None  # which parameters, when that was asked last; None: nobody knows
        self.trusted = False
        self._own_version: list[int] | None = None

    # Made once.

    def _copy(self, module: nn.Module) -> nn.Module:
        """The copy of a module and all below it, made once each."""
        made: nn.Module | None = self._copies.get(id(module))
        if made is not None:
            return made
        if isinstance(module, (Metric, MetricCollection)):
            return self._copy_metric(module)
        shell = self._copies[id(module)] = shell_of(module)
        self._shells.append((module, shell))
        parameters, buffers = parameters_of(shell), buffers_of(shell)
        for name, parameter in parameters_of(module).items():
            parameters[name] = None if parameter is None else self._copy_parameter(parameter)
            self._slots += [(parameters, name, parameter)] if parameter is not None else []
        sources = buffers_of(module)
        for name, buffer in sources.items():
            buffers[name] = None if buffer is None else self._copy_buffer(buffer)
            self._buffers += [(sources, buffers, name)] if buffer is not None else []
        for name, child in children_of(module).items():
            children_of(shell)[name] = None if child is None else self._copy(child)
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
        made: nn.Module = copy.deepcopy(module, dict(self._copies)).to(self.device)
        for source, other in zip(module.modules(), made.modules(), strict=True):
            if isinstance(source, Metric) and isinstance(other, Metric) and id(source) not in self._copies:
                self.metrics.append((source, other))
                take_metric_state(other)
            self._copies[id(source)] = other
        return made

    def _private_attributes(self, owner: type, source: dict[str, Any], target: dict[str, Any]) -> _Attributes:
        kept = {name: target[name] for name in STRUCTURE}
        replaced = {}
        for name, value in source.items():
            if name not in kept and (own := self._own(value)) is not value:
                kept[name], replaced[name] = own, value
        containers = [
            value for name, value in source.items() if isinstance(value, (dict, list)) and name not in STRUCTURE
        ]
        seen = list(source.values())
        lengths = list(map(len, containers)) if any(containers) else []
        own = owner.__module__.startswith("torch.nn.modules.") and not replaced
        is_plain = own and all(isinstance(value, _PLAIN) for value in seen)
        return _Attributes(source, target, kept, replaced, seen, containers, lengths, is_plain)

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
            items = [self._own(item) for item in value.values()]
            return rebuild(value, items) if any(map(_differ, items, value.values())) else value
        return value

    # Before every step.

    def _present_structure(self) -> _Structure:
        sources = [source for source, _ in self._shells]
        registered: list[dict[str, Any]] = [parameters_of(source) for source in sources]
        registered += [children_of(source) for source in sources]
        buffers = [buffers_of(source) for source in sources]
        objects = list(chain.from_iterable(map(dict.values, registered)))
        return _Structure(
            registered, objects, list(map(len, registered)), buffers, _held(buffers) if any(buffers) else None
        )

    def is_outdated(self) -> bool:
        """Whether parameters, buffers or modules have come or gone since the copy was made."""
        registered, objects, lengths, buffers, held = self._structure
        present = chain.from_iterable(map(dict.values, registered))
        same = list(map(len, registered)) == lengths and all(map(is_, present, objects))
        return not same or (any(buffers) if held is None else _held(buffers) != held)

    def refresh_attributes(self) -> None:
        """Sets the copy's attributes to the module's."""
        for index, attributes in enumerate(self._attributes):
            source, target, kept, replaced, seen, containers, lengths, is_plain = attributes
            same = len(source) == len(seen) and (is_plain or all(map(is_, source.values(), seen)))
            if not same or (list(map(len, containers)) != lengths if lengths else any(containers)):
                owner = type(self._shells[index][0])
                self._attributes[index] = attributes = self._private_attributes(owner, source, target)
                kept, replaced = attributes.kept, attributes.replaced
            for name, value in replaced.items():
                if isinstance(value, (list, dict)):  # whose items may have changed
                    kept[name] = self._own(value)
            target.clear()
            target.update(source)
            target.update(kept)
        learned = [parameter.requires_grad for parameter, _ in self.parameters]
        if learned != self._learned:
            self._learned = learned
            for (_, copied), learns in zip(self.parameters, learned, strict=True):
                copied.requires_grad_(learns)

    def has_stale_parameters(self) -> bool:
        """Whether the module's parameters have changed since this was asked last."""
        version, seen = versions([source for source, _ in self.parameters]), self._versions[0]
        same = version is not None and version == seen
        self._changed = (
            None if version is None or seen is None else [a != b for a, b in zip(version, seen, strict=True)]
        )
        self._versions = (version, self._versions[1])
        return not (same and self.trusted)

    def has_stale_buffers(self) -> bool:
        """Whether buffers have changed, here or in the module, since this was asked last."""
        if any(own.get(name) is None for _, own, name in self._buffers):
            return True  # the copy's step has taken one away
        buffers = [tensor for sources, own, name in self._buffers for tensor in (sources[name], own[name])]
        version = versions(buffers)
        same = len(buffers) == len(self._seen_buffers) and not any(map(_differ, buffers, self._seen_buffers))
        stale = not self.trusted or version is None or version != self._versions[1] or not same
        self._seen_buffers, self._versions = buffers, (self._versions[0], version)
        return stale

    def trust(self) -> None:
        """Everything is up to date: what changes from now on leaves a trace, unless somebody says otherwise."""
        self.trusted, self._own_version = True, versions([copied for _, copied in self.parameters])

    def load_parameters(self, tensors: Sequence[Tensor]) -> None:
        """Copies values into the parameters.

        A graph notices it of those that changed in the module, as one of the module's would, and of no others.
        """
        copies: list[Tensor] = [copied for _, copied in self.parameters]
        if self._changed is not None:
            copies = [c if changed else c.data for c, changed in zip(copies, self._changed, strict=True)]
        foreach.copy_(copies, list(tensors))

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Lets the copy compute with other tensors in place of its parameters.

        Args:
            tensors: In the order of `parameters`; these themselves to go back.
        """
        for (source, _), tensor in zip(self.parameters, tensors, strict=True):
            self._copies[id(source)] = tensor
        for own, name, source in self._slots:
            own[name] = self._copies[id(source)]
        for attributes in self._attributes:  # such as the flat list of a recurrent network
            for name, value in attributes.replaced.items():
                if not isinstance(value, nn.Module):
                    attributes.target[name] = attributes.kept[name] = self._own(value)

    def buffers(self) -> list[Tensor]:
        """The module's buffers."""
        return [sources[name] for sources, _, name in self._buffers]

    def load_buffers(self, tensors: Sequence[Tensor]) -> None:
        """Copies values into the buffers, without a trace in the graphs that use them."""
        for (_, own, name), tensor in zip(self._buffers, tensors, strict=True):
            if not _alike(own.get(name), tensor):
                own[name] = torch.empty_like(tensor, device=self.device)
        foreach.copy_([own[name].data for _, own, name in self._buffers], [tensor.data for tensor in tensors])

    def give_back(self) -> None:
        """Makes the module's state that of the copy, which computed in the module's place."""
        if versions([copied for _, copied in self.parameters]) != self._own_version:
            with torch.no_grad():
                foreach.copy_([source for source, _ in self.parameters], [copied for _, copied in self.parameters])
        for sources, own, name in self._buffers:
            buffer = own.get(name)
            if buffer is not None and not _alike(sources[name], buffer):
                sources[name] = torch.empty_like(buffer, device=sources[name].device)
        pairs = [(sources[name], own[name]) for sources, own, name in self._buffers if own.get(name) is not None]
        foreach.copy_([source.data for source, _ in pairs], [buffer.data for _, buffer in pairs])
        for source, target, kept, *_ in self._attributes:
            source.update({name: value for name, value in target.items() if name not in kept})


def _alike(buffer: Tensor | None, other: Tensor) -> bool:
    return buffer is not None and buffer.shape == other.shape and buffer.dtype == other.dtype


def _differ(one: object, other: object) -> bool:
    return one is not other
