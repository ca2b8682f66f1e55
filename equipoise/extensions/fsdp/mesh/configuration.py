"""Changes that `configure_model` makes in a module whose layers it cuts over a row of processes, and the way back."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from equipoise.errors import ConfigurationError
from equipoise.interop.distributed.tensor_parallel import forget_cuts

__all__ = ["Configuration", "check_cut"]


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
        for part in module.modules():
            attributes = dict(_plain_attributes(part))
            self._before.append((part, attributes))
        # Of each part: the name, the value before, the value after.
        self._changes: list[tuple[nn.Module, str, Any, Any]] = []

    @property
    def has_cut(self) -> bool:
        """True if `configure_model` has cut parameters, over the columns or the rows."""
        return any(isinstance(parameter, DTensor) for parameter in self._module.parameters())

    def note_changes(self) -> None:
        """Note what `configure_model` has changed.

        Raises:
            ConfigurationError: If parameters that were one are several now.
        """
        # 1. Parameters that are tied no longer.
        names = dict(self._module.named_parameters(remove_duplicate=False))
        for name, first in self._tied.items():
            if name in names and first in names and names[name] is not names[first]:
                raise ConfigurationError(
                    f"{first} and {name} were one parameter before `configure_model`, which has cut them apart: torch"
                    " makes new parameters for each layer of a plan. Leave both layers out of the plan, or tie them"
                    " again after it."
                )
        # 2. Attributes of the parts that were there before.
        for part, before in self._before:
            after = dict(_plain_attributes(part))
            for name, value in before.items():
                if after.get(name, value) is not value:
                    self._changes.append((part, name, value, after[name]))
        self._before = []

    def restore(self) -> None:
        """Restore what is still as `configure_model` has left it, and forget which layers were cut."""
        # What the run itself has changed since then stays.
        for part, name, before, after in self._changes:
            if vars(part).get(name) is after:
                vars(part)[name] = before
        forget_cuts(self._module)


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


def check_cut(module: nn.Module, tensor: int) -> None:
    """Check that a module is cut over as many processes as compute a batch together.

    Args:
        module: The user's module, after `configure_model`.
        tensor: The number of processes.

    Raises:
        ConfigurationError: If no parameter is cut, so that all of them would compute the same; or if a parameter is cut
            and has no values yet.
    """
    # 1. The parameters that are cut.
    cut = {}
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            cut[name] = parameter
    if not cut and tensor > 1:
        raise ConfigurationError(
            f"FSDPStrategy(tensor={tensor}): {type(module).__name__} has no layer that is cut over {tensor} processes,"
            " so each of them would compute the same. Cut layers in `configure_model`, by torch's"
            f" parallelize_module(self.network, self.device_mesh['tensor_parallel'], plan), or leave tensor out."
        )
    # 2. Each has values.
    for name, parameter in cut.items():
        if parameter.is_meta:
            raise ConfigurationError(
                f"{name} is cut and on the meta device, so that no first values can be drawn for the whole of it. Make"
                " the layer on a real device, and cut it afterwards."
            )
