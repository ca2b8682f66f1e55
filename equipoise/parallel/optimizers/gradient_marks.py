"""Marks on gradients: where they come from. A mark stays as long as the tensor that `.grad` holds, also if it changes.

Attributes of a tensor are all that follows it; its identity is used again once it is gone.
"""

from collections.abc import Iterable

from torch import Tensor

__all__ = ["is_exchanged", "mark_exchanged", "mark_scaled", "scaling_of"]

_EXCHANGED = "_equipoise_exchanged"
_SCALED = "_equipoise_scaled"


def mark_exchanged(gradients: Iterable[Tensor | None]) -> None:
    """Note that all processes have these gradients alike."""
    for gradient in gradients:
        if gradient is not None:
            setattr(gradient, _EXCHANGED, True)


def is_exchanged(gradient: Tensor) -> bool:
    """Return whether all processes had this gradient alike, before anybody changed it."""
    return hasattr(gradient, _EXCHANGED)


def mark_scaled(gradient: Tensor, scaled: str) -> None:
    """Note of which size a gradient is; see `scaling_of`."""
    setattr(gradient, _SCALED, scaled)


def scaling_of(gradient: Tensor) -> str:
    """Return "scaled", "plain" or "both", by the losses of its backwards; "" if it comes from none."""
    scaled: str = getattr(gradient, _SCALED, "")
    return scaled
