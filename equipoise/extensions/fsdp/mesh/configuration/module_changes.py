"""Changes that `configure_model` makes in a module whose layers it cuts over a row of processes, and the way back."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.interop.tensor_parallel import forget_cuts
from equipoise.extensions.fsdp.mesh.grid import copy_marks
from equipoise.interop.distributed.fully_sharded import unshard_by_hand

__all__ = ["ModuleChanges", "whole_parameters"]


class ModuleChanges:
    """Notes the attributes of a module and its submodules before `configure_model`, to be restored after the run.

    A module that cuts its attention divides the number of heads as well, which a whole layer must not see.

    Calls in a run, in order: `note_new_parts`, if a plan cuts the layers; `note_changes`, before these are in shards;
    `copy_marks`, after the conversion to a precision; `forget_parameters`, once they are in shards; `restore`.

    Args:
        module: The user's module.
        mesh: The mesh that the module sees.

    Attributes:
        mesh: That mesh.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self._module = module
        self._tied = _tied_names(module)
        # Each part, with its attributes.
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []
        self.note_new_parts()
        self._parameters: dict[str, nn.Parameter] = dict(module.named_parameters(remove_duplicate=False))
        # Of each part: the name, the value before, the value after.
        self._changes: list[tuple[nn.Module, str, Any, Any]] = []

    @property
    def has_cut(self) -> bool:
        """True if `configure_model` has cut parameters, over the columns or the rows."""
        return any(isinstance(parameter, DTensor) for parameter in self._module.parameters())

    def note_new_parts(self) -> None:
        """Note the attributes of parts that were not there before, so that they receive them back as well."""
        noted = {id(part) for part, _ in self._before}
        for part in self._module.modules():
            if id(part) not in noted:
                self._before.append((part, dict(_plain_attributes(part))))

    def note_changes(self) -> None:
        """Note what `configure_model` has changed.

        Raises:
            ConfigurationError: If parameters that were one are several now.
        """
        names = dict(self._module.named_parameters(remove_duplicate=False))
        for name, first in self._tied.items():
            if name in names and first in names and names[name] is not names[first]:
                raise ConfigurationError(
                    f"{first} and {name} were one parameter before `configure_model`, which has cut them apart: torch"
                    " makes new parameters for each layer of a plan. Leave both layers out of the plan, or tie them"
                    " again after it."
                )
        self._note_changed_attributes()

    def copy_marks(self) -> None:
        """Give what stands in the place of parameters their attributes, which optimisers may read."""
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if name in self._parameters:
                copy_marks(parameter, self._parameters[name])

    def forget_parameters(self) -> None:
        """Release the parameters of before, as the run has the module in shards and makes it whole again."""
        self._parameters = {}

    def restore(self) -> None:
        """Restore what is still as `configure_model` has left it, and forget which layers were cut.

        After an error that came before the run had the module, it receives its parameters of before `configure_model`.
        """
        self._restore_attributes()
        forget_cuts(self._module)
        # An error came before the run had the module, if some are still cut.
        if self.has_cut:
            self._restore_parameters()
        self.forget_parameters()

    def _note_changed_attributes(self) -> None:
        """Note which attributes differ from those before, which are forgotten."""
        for part, before in self._before:
            after = dict(_plain_attributes(part))
            for name, value in before.items():
                if after.get(name, value) is not value:
                    self._changes.append((part, name, value, after[name]))
        self._before = []

    def _restore_attributes(self) -> None:
        # An error may have come before they were noted.
        self._note_changed_attributes()
        # What the run itself has changed since then stays.
        for part, name, before, after in self._changes:
            if vars(part).get(name) is after:
                vars(part)[name] = before

    def _restore_parameters(self) -> None:
        originals = whole_parameters(dict(self._module.named_parameters(remove_duplicate=False)))
        for name, parameter in self._parameters.items():
            # A layer may have been replaced.
            if name in originals:
                originals[name] = parameter
        units = [part for part in self._module.modules() if isinstance(part, FSDPModule)]
        unshard_by_hand(units, originals, self._module)


def _tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of parameters that have several, each with the first name."""
    firsts: dict[int, str] = {}
    tied = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = firsts.setdefault(id(parameter), name)
        if first != name:
            tied[name] = first
    return tied


@cache
def _attributes_of_every_module() -> frozenset[str]:
    """Return the attributes that every module has."""
    return frozenset(vars(LightningModule()))


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that a class of a module sets by itself, without tensors and submodules."""
    for name, value in vars(module).items():
        if name not in _attributes_of_every_module() and not isinstance(value, (Tensor, nn.Module)):
            yield name, value


def whole_parameters(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that a module has after a run: its own, and new ones in place of those that are cut.

    New ones have no values yet, and no memory.

    Args:
        parameters: The parameters that it has now, by name.
    """
    replacements: dict[int, nn.Parameter] = {}
    for parameter in parameters.values():
        if isinstance(parameter, DTensor):
            # As in all parameters after an error, values read as NaN.
            missing = float("nan") if parameter.is_floating_point() else 0
            element = torch.full((), missing, dtype=parameter.dtype)
            replacement = nn.Parameter(element.expand(parameter.shape), parameter.requires_grad)
            copy_marks(replacement, parameter)
            replacements[id(parameter)] = replacement
    replaced = {}
    for name, parameter in parameters.items():
        # A tied parameter stays tied.
        replaced[name] = replacements.get(id(parameter), parameter)
    return replaced
