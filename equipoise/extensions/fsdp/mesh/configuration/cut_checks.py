"""Checks that a module is cut, and in shards, over the processes that the strategy was given."""

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from equipoise.errors import ConfigurationError
from equipoise.extensions.fsdp.mesh.grid import DATA, TENSOR, is_cut

__all__ = ["check_cut"]


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
            " and self.device_mesh['tensor_parallel'], in each run, since layers are whole again after it; or leave"
            " tensor out."
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
        # Torch's class of units declares no methods of a module.
        parameters = unit.named_parameters()
        if not isinstance(unit, FSDPModule):
            continue
        for name, parameter in parameters:
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
