"""Tensors of a module in shards that several processes hold alike."""

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from equipoise.parallel.communication.processes import Processes
from equipoise.parallel.divergence.replicated import Replicated, unchanging_buffers

__all__ = ["replicated_parts"]


def replicated_parts(module: nn.Module, processes: Processes) -> Replicated:
    """Return the shards of this process, by the place of each in the whole, and the buffers.

    Processes have the same shards where the module has several replicas, or parameters lie on fewer processes than all.
    Those that compute a batch together do so with the same bits on CPUs alone: no exchange makes gradients of layers
    that are not cut the same.

    Args:
        module: The module in shards, none of which is gathered.
        processes: The processes.
    """
    parts: dict[str, dict[str, Tensor]] = {}
    for name, parameter in module.named_parameters():
        place = _place_of(parameter, processes.world_size)
        if place is None:
            continue
        local = parameter.detach()
        if isinstance(local, DTensor):
            local = local.to_local()
        together = processes.processes_per_batch
        if together > 1 and local.device.type != "cpu":
            place += f" in column {processes.rank % together}"
        parts.setdefault(place, {})[name] = local
    return Replicated(parts, unchanging_buffers(module))


def _place_of(parameter: Tensor, world_size: int) -> str | None:
    """Return the place of a shard in the whole; None if no other process has this shard."""
    if not isinstance(parameter, DTensor):
        return "whole"
    mesh = parameter.device_mesh
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    places = []
    for dimension, (placement, coordinate) in enumerate(zip(parameter.placements, coordinates, strict=True)):
        if not placement.is_replicate():
            places.append(f"{coordinate} along {dimension}")
    if len(places) == mesh.ndim and mesh.size() == world_size:
        return None
    return f"shard {', '.join(places)}"
