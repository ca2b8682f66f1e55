"""Whole weights of a sharded module, for readings of memory.

Torch's modules for shards take long to import, so that is left to a module that is sharded.
"""

from torch import Tensor, nn

__all__ = ["whole_weights"]


def whole_weights(module: nn.Module) -> list[Tensor] | None:
    """Return the whole weights of a module in shards, which have memory only while they are gathered.

    Those that no forward has gathered yet are missing.

    Args:
        module: The module.

    Returns:
        The weights; None if `fully_shard` was applied to no part of the module.
    """
    units = [part for part in module.modules() if hasattr(part, "_get_fsdp_state")]
    if not units:
        return None
    from equipoise.interop.distributed.fully_sharded import unsharded_parameters

    weights: list[Tensor] = []
    for unit in units:
        weights.extend(unsharded_parameters(unit))
    return weights
