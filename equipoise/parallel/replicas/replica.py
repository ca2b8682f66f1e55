"""One replica: a copy of a module on another device that lasts as long as a run.

It has the structure of the module, parameters and buffers of its own, and shares every other attribute. Attributes that
refer to the module, to parts of it or to its device refer to the copy's instead.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.interop.torch import foreach
from equipoise.interop.torch.modules import STRUCTURE, versions
from equipoise.parallel.replicas.module_copy import ModuleCopy, Registered
from equipoise.parallel.replicas.module_structure import ModuleStructure

__all__ = ["Replica"]


AttributeDict = dict[str, Any]

# Types of attributes that refer to no module.
_PLAIN = (
    bool,
    int,
    float,
    str,
    tuple,
    dict,
    list,
    set,
    torch.dtype,
    type(None),
)


class _Attributes(NamedTuple):
    """The attributes of a module and of its copy.

    Attributes:
        source: The attributes of the module.
        target: The attributes of the copy.
        overrides: The attributes of the copy that differ from those of the module.
        originals: The values in the module that `overrides` stand for, without the dictionaries of `STRUCTURE`.
        values: The attributes of the module when `overrides` were made.
        containers: The dictionaries and lists among them, which may get other items.
        lengths: Numbers of items in the containers; empty if all containers are.
        is_plain: True for a module of torch whose attributes are numbers and the like. Only a new attribute could refer
            to a module.
    """

    source: AttributeDict
    target: AttributeDict
    overrides: AttributeDict
    originals: AttributeDict
    values: list[Any]
    containers: list[Any]
    lengths: list[int]
    is_plain: bool


class Replica:
    """A copy of a module on one device.

    Args:
        original: The module.
        device: The device of the copy.

    Attributes:
        module: The copy.
        parameters: The module's parameters, each with its copy.
        sources: The module's parameters.
        copies: Their copies.
        metrics: The module's metrics, each with its copy.
        buffer_slots: Every occurrence of a buffer: the dictionary of the module, that of the copy, and its name.
        structure: The structure of the module when the copy was made.
        trusted: True if every change of a tensor since the last refresh is visible in its version.
    """

    def __init__(self, original: nn.Module, device: torch.device) -> None:
        # 1. The copy.
        self.device = device
        self._copy = ModuleCopy(original, device)
        self.buffer_slots = self._copy.buffers
        self._shells = self._copy.shells
        self.module = self._copy.module
        self.parameters = self._copy.parameters
        self.sources: list[Tensor] = [source for source, _ in self.parameters]
        self.copies: list[Tensor] = [copied for _, copied in self.parameters]
        self.metrics = self._copy.metrics

        # 2. Its attributes.
        self._trainable: list[bool] = []
        self._attributes: list[_Attributes] = [
            self._compare_attributes(type(module), vars(module), vars(shell)) for module, shell in self._shells
        ]
        self.refresh_attributes()
        for _, shell in self._shells:
            if isinstance(shell, nn.RNNBase):
                # For cuDNN. The weights stay in one block when values are copied into them.
                shell.flatten_parameters()

        # 3. What the module was like at the last refresh.
        self.structure = ModuleStructure(self.parts)
        self.trusted = False
        self._last_buffers: list[Tensor] = []
        self._parameter_versions: list[int] | None = None
        self._buffer_versions: list[int] | None = None
        # Versions of the copy's own parameters.
        self._copy_versions: list[int] | None = None
        # Whether each parameter had changed when their versions were noted last. None: unknown.
        self._has_changed: list[bool] | None = None

    def _compare_attributes(self, kind: type, source: AttributeDict, target: AttributeDict) -> _Attributes:
        """Find the attributes of a module of this type that refer to other objects in the copy."""
        overrides = {name: target[name] for name in STRUCTURE}
        originals = {}
        containers = []
        for name, value in source.items():
            if name in STRUCTURE:
                continue
            substitute = self._copy.substitute(value)
            if substitute is not value:
                overrides[name] = substitute
                originals[name] = value
            if isinstance(value, (dict, list)):
                containers.append(value)

        values = list(source.values())
        lengths = []
        if any(containers):
            lengths = list(map(len, containers))
        is_plain = False
        is_of_torch = kind.__module__.startswith("torch.nn.modules.")
        if is_of_torch and not originals:
            # Modules, methods and tensors are no plain values.
            is_plain = all(isinstance(value, _PLAIN) for value in values)
        return _Attributes(
            source=source,
            target=target,
            overrides=overrides,
            originals=originals,
            values=values,
            containers=containers,
            lengths=lengths,
            is_plain=is_plain,
        )

    @property
    def parts(self) -> list[nn.Module]:
        """The module and all below it, but not metrics."""
        return [module for module, _ in self._shells]

    def refresh_attributes(self) -> None:
        """Set the copy's attributes to the module's."""
        for index in range(len(self._attributes)):
            self._refresh_part(index)
        self.refresh_trainable()

    def _refresh_part(self, index: int) -> None:
        """Set the attributes of one part of the copy to those of the module's."""
        attributes = self._attributes[index]
        source, target, overrides, originals, values, containers, lengths, is_plain = attributes

        # 1. Compare the module's attributes with those of the last time. Only other values, or other items in
        #    containers, may refer to other objects.
        is_unchanged = len(source) == len(values)
        if is_unchanged and not is_plain:
            is_unchanged = all(map(is_, source.values(), values))
        if is_unchanged:
            if lengths:
                is_unchanged = list(map(len, containers)) == lengths
            else:
                is_unchanged = not any(containers)
        if not is_unchanged:
            module, _ = self._shells[index]
            attributes = self._compare_attributes(type(module), source, target)
            self._attributes[index] = attributes
            overrides = attributes.overrides
            originals = attributes.originals

        # 2. Items of containers may have changed without a change of length.
        for name, value in originals.items():
            if isinstance(value, (list, dict)):
                overrides[name] = self._copy.substitute(value)

        # 3. Attributes that the copy set itself are forgotten.
        target.clear()
        target.update(source)
        target.update(overrides)

    def refresh_trainable(self) -> None:
        """Let the copy's parameters require gradients where the module's do."""
        trainable = [source.requires_grad for source in self.sources]
        if trainable != self._trainable:
            self._trainable = trainable
            pairs = zip(self.copies, trainable, strict=True)
            for copied, requires_grad in pairs:
                copied.requires_grad_(requires_grad)

    def has_stale_parameters(self) -> bool:
        """Note the versions of the module's parameters; return whether these have changed since the last call."""
        last_versions = self._parameter_versions
        present_versions = versions(self.sources)
        self._parameter_versions = present_versions
        # Tensors made in inference mode have no version.
        if present_versions is None or last_versions is None:
            self._has_changed = None
            return True
        pairs = zip(present_versions, last_versions, strict=True)
        self._has_changed = [present != last for present, last in pairs]
        return not self.trusted or present_versions != last_versions

    def has_stale_buffers(self) -> bool:
        """Note the buffers of the module and of the copy; return whether any has changed since the last call."""
        buffers = []
        for sources, copies, name in self.buffer_slots:
            copied = copies.get(name)
            # The copy's step may have removed it.
            if copied is None:
                return True
            buffers.append(sources[name])
            buffers.append(copied)

        last_versions = self._buffer_versions
        last_buffers = self._last_buffers
        self._buffer_versions = versions(buffers)
        self._last_buffers = buffers
        if not self.trusted or self._buffer_versions is None:
            return True
        if self._buffer_versions != last_versions:
            return True
        if len(buffers) != len(last_buffers):
            return True
        return not all(map(is_, buffers, last_buffers))

    def trust(self) -> None:
        """Note that everything is up to date: versions show all changes from now on, until `distrust`."""
        self.trusted = True
        self._copy_versions = versions(self.copies)

    def distrust(self) -> None:
        """Note that tensors may have changed without a change of version, as through `.data`."""
        self.trusted = False

    def load_parameters(self, tensors: Sequence[Tensor]) -> None:
        """Copy values into the parameters.

        A graph notices a change of the parameters that changed in the module, as one of the module's would, and of no
        others.

        Args:
            tensors: A tensor for each of `parameters`, in order.
        """
        targets = self.copies
        if self._has_changed is not None:
            targets = []
            pairs = zip(self.copies, self._has_changed, strict=True)
            for copied, changed in pairs:
                if changed:
                    targets.append(copied)
                else:
                    targets.append(copied.data)
        foreach.copy_(targets, list(tensors))

    def discard_gradients(self) -> None:
        """Remove the gradients of the copy."""
        for copied in self.copies:
            copied.grad = None

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Compute with other tensors in place of the copy's parameters.

        Args:
            tensors: A tensor for each of `parameters`, in order. The copies themselves end it.
        """
        self._copy.use(tensors)
        # Attributes may hold parameters, too, such as the flat list of a recurrent network.
        for attributes in self._attributes:
            for name, value in attributes.originals.items():
                if isinstance(value, nn.Module):
                    continue
                substitute = self._copy.substitute(value)
                attributes.overrides[name] = substitute
                attributes.target[name] = substitute

    def buffers(self) -> list[Tensor]:
        """Return the module's buffers."""
        return [sources[name] for sources, _, name in self.buffer_slots]

    def load_buffers(self, tensors: Sequence[Tensor]) -> None:
        """Copy values into the buffers, without a trace in the graphs that use them.

        Args:
            tensors: A tensor for each of `buffers()`, in order.
        """
        slots = zip(self.buffer_slots, tensors, strict=True)
        _write_buffers([(copies, name, tensor, self.device) for (_, copies, name), tensor in slots])

    def give_back(self) -> None:
        """Set the module's state to that of the copy, which computed in the module's place."""
        # 1. Parameters, if the step changed them.
        present = versions(self.copies)
        if present is None or present != self._copy_versions:
            with torch.no_grad():
                foreach.copy_(self.sources, self.copies)

        # 2. Buffers, which may have another shape now.
        entries = []
        for sources, copies, name in self.buffer_slots:
            copied = copies.get(name)
            if copied is not None:
                entries.append((sources, name, copied, sources[name].device))
        _write_buffers(entries)

        # 3. Attributes that are shared.
        for attributes in self._attributes:
            for name, value in attributes.target.items():
                if name not in attributes.overrides:
                    attributes.source[name] = value


def _write_buffers(entries: Sequence[tuple[Registered, str, Tensor, torch.device]]) -> None:
    """Copy values into registered buffers, which are made anew on a device where there is none of that shape and dtype.

    Args:
        entries: The dictionary, name, values and device of each buffer.
    """
    targets = []
    values = []
    for registered, name, value, device in entries:
        target = registered.get(name)
        if target is None or target.shape != value.shape or target.dtype != value.dtype:
            target = torch.empty_like(value, device=device)
            registered[name] = target
        targets.append(target.data)
        values.append(value.data)
    foreach.copy_(targets, values)
