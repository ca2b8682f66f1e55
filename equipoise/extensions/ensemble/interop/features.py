"""Members that are computed together: the private names that they use."""

from equipoise.interop.adapters import Adapter, Feature

__all__ = ["ENSEMBLE"]

_FUNCTORCH = "torch._C._functorch"

ENSEMBLE = Feature(
    "ensemble",
    "strategy='ensemble'",
    (
        Adapter(
            "torch",
            (
                f"{_FUNCTORCH}._add_batch_dim",
                f"{_FUNCTORCH}._remove_batch_dim",
                f"{_FUNCTORCH}._vmap_increment_nesting",
                f"{_FUNCTORCH}._vmap_decrement_nesting",
                f"{_FUNCTORCH}.maybe_current_level",
                f"{_FUNCTORCH}.maybe_get_level",
            ),
            "`torch.vmap` is called",
        ),
    ),
)
