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
from torch.nn.parameter import is_lazy

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.interop.tensor_parallel import forget_cuts
from equipoise.extensions.fsdp.mesh.grid import DATA, TENSOR, copy_marks, is_cut, part_of
from equipoise.interop.distributed.fully_sharded import unshard_by_hand
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.snapshot import random_state
from equipoise.strategies.distributed.module_sync import check_same_modules

__all__ = ["Configuration", "check_cut", "copy_along_rows", "share_values", "whole_parameters"]


def share_values(module: nn.Module, processes: Processes) -> None:
    """Give all processes the values and the random numbers of rank 0, before `configure_model` cuts or draws weights.

    Afterwards a process has parts of them alone.

    Args:
        module: The user's module.
        processes: The processes.
    """
    # 1. Random numbers.
    state = processes.broadcast(random_state.capture_host().state_dict())
    random_state.RandomState.from_state_dict(state).restore()
    # 2. Values, if all of them are there.
    if not any(map(is_lazy, module.parameters())):
        check_same_modules(module)
        copy_from_first(tensor for tensor in [*module.parameters(), *module.buffers()] if not tensor.is_meta)


class Configuration:
    """Notes the attributes of a module and its submodules before `configure_model`, to be restored after the run.

    A module that cuts its attention divides the number of heads as well, which a whole layer must not see.

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
        self._note_attributes()

    def copy_marks(self) -> None:
        """Give what stands in the place of parameters their attributes, which optimisers may read."""
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            if name in self._parameters:
                copy_marks(parameter, self._parameters[name])

    def _note_attributes(self) -> None:
        for part, before in self._before:
            after = dict(_plain_attributes(part))
            for name, value in before.items():
                if after.get(name, value) is not value:
                    self._changes.append((part, name, value, after[name]))
        self._before = []

    def hand_over(self) -> None:
        """Release the parameters of before, as the run has the module in shards and makes it whole again."""
        self._parameters = {}

    def restore(self) -> None:
        """Restore what is still as `configure_model` has left it, and forget which layers were cut.

        After an error that came before the run had the module, it receives its parameters of before `configure_model`.
        """
        self._note_attributes()
        # What the run itself has changed since then stays.
        for part, name, before, after in self._changes:
            if vars(part).get(name) is after:
                vars(part)[name] = before
        forget_cuts(self._module)
        # An error came before the run had the module, if some are still cut.
        present = dict(self._module.named_parameters(remove_duplicate=False))
        if any(isinstance(parameter, DTensor) for parameter in present.values()):
            originals = whole_parameters(present)
            for name, parameter in self._parameters.items():
                # A layer may have been replaced.
                if name in originals:
                    originals[name] = parameter
            units = [part for part in self._module.modules() if isinstance(part, FSDPModule)]
            unshard_by_hand(units, originals, self._module)
        self.hand_over()


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
def _of_torch_and_lightning() -> frozenset[str]:
    """Return the attributes that every module has."""
    return frozenset(vars(LightningModule()))


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that a class of a module sets by itself, without tensors and submodules."""
    for name, value in vars(module).items():
        if name not in _of_torch_and_lightning() and not isinstance(value, (Tensor, nn.Module)):
            yield name, value


def whole_parameters(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that a module has after a run: its own, and new ones in place of those that are cut.

    New ones have no values yet, and no memory.

    Args:
        parameters: The parameters that it has now, by name.
    """
    wholes: dict[int, nn.Parameter] = {}
    for parameter in parameters.values():
        if isinstance(parameter, DTensor):
            # As in all parameters after an error, values read as NaN.
            missing = float("nan") if parameter.is_floating_point() else 0
            element = torch.full((), missing, dtype=parameter.dtype)
            whole = nn.Parameter(element.expand(parameter.shape), parameter.requires_grad)
            copy_marks(whole, parameter)
            wholes[id(parameter)] = whole
    replaced = {}
    for name, parameter in parameters.items():
        # A tied parameter stays tied.
        replaced[name] = wholes.get(id(parameter), parameter)
    return replaced


def copy_along_rows(module: nn.Module, row: DeviceMesh) -> None:
    """Copy what the processes of a row hold alike from the first of them, where torch does not: in units of the user.

    Args:
        module: The user's module, after `configure_model`.
        row: The processes that compute a batch together.
    """
    alike = []
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and not is_cut(parameter) and not parameter.is_meta:
            alike.append(part_of(parameter.detach()))
    if row.size() > 1:
        copy_from_first(alike, row.get_group())


def check_cut(module: nn.Module, tensor: int, *, must_cut: bool = True) -> None:
    """Check that a module is cut over as many processes as compute a batch together.

    Args:
        module: The user's module, after `configure_model`.
        tensor: The number of processes.
        must_cut: Whether one parameter at least must be cut. Default: True.

    Raises:
        ConfigurationError: If none is, so that all processes would compute the same; if a parameter is cut
            and has no values yet; if a buffer is cut; or if a unit is in shards over other processes than a column.
    """
    if must_cut and tensor > 1 and not any(map(is_cut, module.parameters())):
        raise ConfigurationError(
            f"FSDPStrategy(tensor={tensor}): {type(module).__name__} has no layer that is cut over {tensor} processes,"
            " so each of them would compute the same. Say which layers are cut, as in tensor_plan={'blocks.*.up':"
            " 'colwise', 'blocks.*.down': 'rowwise'}, or cut them in `configure_model`, by torch's parallelize_module"
            " and self.device_mesh['tensor_parallel']; or leave tensor out. After a run layers are whole again: a hook"
            " that makes the network once, and returns early where it is there already, cuts it in each run"
            " nevertheless."
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter.is_meta:
            raise ConfigurationError(
                f"{name} is cut and on the meta device, so that no first values can be drawn for the whole of it. Make"
                " the layer on a real device, and cut it afterwards."
            )
    for name, buffer in module.named_buffers():
        if isinstance(buffer, DTensor):
            raise ConfigurationError(
                f"{name} is a buffer of a layer that is cut, and torch cuts it as well, which is not supported. Move"
                " it to a module around the layer, or leave the layer out of the plan."
            )
    if tensor > 1:
        _check_units(module, tensor)


def _check_units(module: nn.Module, tensor: int) -> None:
    """Check that the units that `configure_model` has sharded are in shards over the column of a process alone."""
    for unit_name, unit in module.named_modules():
        parameters = dict(unit.named_parameters())
        if not isinstance(unit, FSDPModule):
            continue
        for name, parameter in parameters.items():
            if not _is_over_column(parameter):
                raise ConfigurationError(
                    f"{name} of the unit {unit_name or '(root)'} is not in shards over"
                    f" self.device_mesh['data_parallel'] alone. With tensor={tensor} its gradient would count batches"
                    " wrongly. Give `fully_shard` in `configure_model` that mesh,"
                    " mesh=self.device_mesh['data_parallel'], and no ignored_params."
                )


def _is_over_column(parameter: Tensor) -> bool:
    """Return True if a parameter is in shards over the column, and over nothing else but the row of a cut."""
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return names in ((DATA,), (DATA, TENSOR)) and not parameter.placements[0].is_replicate()
