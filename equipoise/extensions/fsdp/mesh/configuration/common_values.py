"""Values that processes have in common: all of them before layers are cut, and those of a row afterwards."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from equipoise.extensions.fsdp.mesh.grid import is_cut, part_of
from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.communication.tensor_copies import copy_from_first
from equipoise.parallel.snapshot import random_state
from equipoise.strategies.distributed.module_sync import check_same_modules

__all__ = ["copy_along_rows", "share_values"]


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


def copy_along_rows(module: nn.Module, row: DeviceMesh) -> None:
    """Copy what the processes of a row hold alike from the first of them.

    Torch copies nothing in units that the user has sharded by `fully_shard`.

    Args:
        module: The user's module, after `configure_model`.
        row: The processes that compute a batch together.
    """
    if row.size() == 1:
        return
    alike = []
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and not is_cut(parameter) and not parameter.is_meta:
            alike.append(part_of(parameter.detach()))
    copy_from_first(alike, row.get_group())
