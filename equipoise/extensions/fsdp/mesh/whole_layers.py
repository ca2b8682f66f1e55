"""A copy of a module in which layers that a plan has cut are whole in each process."""

import copy
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from equipoise.extensions.fsdp.interop.tensor_parallel import set_device_mesh
from equipoise.extensions.fsdp.mesh.grid import TENSOR, part_of, row_placement
from equipoise.extensions.fsdp.state.gathering import gather_whole
from equipoise.interop.distributed.fully_sharded import unshard_by_hand
from equipoise.interop.lightning.classes import is_overridden
from equipoise.parallel.snapshot import random_state
from equipoise.parallel.snapshot.attributes import Attributes
from equipoise.parallel.snapshot.generators import find_generators
from equipoise.precision import Precision

__all__ = ["WholeLayers"]


class WholeLayers:
    """A copy of a module for which a row has one process, so that its plan cuts nothing.

    The copy is made before `configure_model` and without values of parameters, and its own `configure_model` sees a
    mesh of this process alone. So an attribute such as the number of heads is that of whole layers.

    Args:
        module: The user's module, before its layers are cut.

    Attributes:
        module: The copy.
    """

    def __init__(self, module: LightningModule) -> None:
        memo: dict[int, Any] = {}
        for parameter in module.parameters():
            memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        # Without the trainer, as Lightning leaves it out.
        self.module = copy.deepcopy(module, memo)
        self._group: dist.ProcessGroup | None = None
        self._later = Attributes(())
        self._names: dict[nn.Module, str] = {}

    def configure(self, module: LightningModule, precision: Precision, mesh: DeviceMesh) -> None:
        """Call the copy's `configure_model`, once that of the module was called and its layers are in shards.

        Args:
            module: The user's module.
            precision: Converts the copy, as it has converted the module.
            mesh: The mesh of the run.
        """
        self.module.trainer = module.trainer
        kind = mesh.device_type
        if is_overridden("configure_model", self.module):
            rank = dist.get_rank()
            self._group = dist.new_group([rank], use_local_synchronization=True)
            # Along each dimension this process is alone.
            here = torch.full((1,) * mesh.ndim, rank)
            groups: Any = [self._group] * mesh.ndim
            alone = DeviceMesh.from_group(groups, kind, mesh=here, mesh_dim_names=mesh.mesh_dim_names)
            set_device_mesh(self.module, alone)
            device = torch.device(kind)
            with random_state.isolated(), device, precision.init_context():
                self.module.configure_model()
        precision.convert_module(self.module)
        # Its own values take no memory until the first step.
        self._replace(dict(_on_meta(self.module)))
        self._names = {part: name for name, part in module.named_modules()}
        self._later = Attributes(self._names)
        self._later.mark()

    def fill(self, module: nn.Module, device: torch.device) -> None:
        """Give the copy the present values of the module; all processes call it together.

        Args:
            module: The user's module, whose weights are in shards.
            device: The device of this process.
        """
        # 1. Whole parameters, and buffers.
        trained = dict(module.named_parameters())
        values = {}
        for name, parameter in trained.items():
            values[name] = _gathered(parameter)
        self._replace(values)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(trained[name].requires_grad)
        parts = dict(self.module.named_modules())
        for name, buffer in module.named_buffers():
            owner, _, last = name.rpartition(".")
            setattr(parts[owner], last, buffer.detach().clone())

        # 2. Attributes that hooks have set since, training modes, and generators, which the caller brings back.
        generators = set(map(id, find_generators(self._names, depth=1)))
        changed = {(id(holder), name) for holder, name in self._later.changes()}
        for original, place in self._names.items():
            twin = parts[place]
            twin.training = original.training
            if isinstance(twin, Metric):
                twin.to(device)
            attributes: dict[str, Any] = twin.__dict__
            for name, attribute in vars(original).items():
                is_new = (id(original), name) in changed
                is_method = isinstance(attribute, MethodType)
                if id(attribute) in generators or (is_new and not is_method):
                    attributes[name] = attribute

    def _replace(self, values: Mapping[str, Tensor]) -> None:
        """Replace all parameters by whole values, by the first name of each; one that is tied stays tied."""
        twins: dict[int, nn.Parameter] = {}
        for name, parameter in self.module.named_parameters():
            twins[id(parameter)] = nn.Parameter(_like(parameter, values[name]), parameter.requires_grad)
        replaced = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            replaced[name] = twins[id(parameter)]
        # Units of `configure_model` would gather in each forward what is whole.
        units = [part for part in self.module.modules() if isinstance(part, FSDPModule)]
        unshard_by_hand(units, replaced, self.module)

    def close(self) -> None:
        """Release the memory of the copy."""
        self._replace(dict(_on_meta(self.module)))
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def _on_meta(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        yield name, part_of(parameter.detach()).to("meta")


def _gathered(tensor: Tensor) -> Tensor:
    """Return a whole tensor on the device of its parts."""
    detached = tensor.detach()
    if not isinstance(detached, DTensor):
        return detached.clone()
    # A tensor that is cut over one process alone is returned as it is.
    return gather_whole(detached).clone()


def _like(parameter: nn.Parameter, full: Tensor) -> Tensor:
    """Return a whole tensor as a DTensor of one process if the parameter is one, as layers of a plan expect it."""
    placement = row_placement(parameter)
    if placement is None:
        return full
    assert isinstance(parameter, DTensor)
    mesh = parameter.device_mesh
    if mesh.ndim > 1:
        mesh = mesh[TENSOR]
    return DTensor.from_local(full, mesh, [placement], run_check=False)
