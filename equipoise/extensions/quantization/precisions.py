"""Precisions of float8 by name: each is bfloat16 with the callback `Float8Training`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from equipoise.errors import ConfigurationError
from equipoise.extensions.quantization.float8_training import Float8Training
from equipoise.names.precisions import OfferedPrecision

__all__ = ["FP8", "FP8_ROWWISE", "FP8_TRUE"]


def _with_float8(callbacks: Sequence[Any], recipe: Any = None) -> list[Any]:
    """Return callbacks with a Float8Training, that of the user if there is one.

    Args:
        callbacks: The user's callbacks.
        recipe: The recipe that the name says. Default: None, that of the callback.

    Raises:
        ConfigurationError: If the user's callback has another recipe.
    """
    for callback in callbacks:
        if not isinstance(callback, Float8Training):
            continue
        if recipe not in (None, callback.recipe):
            raise ConfigurationError(
                f"precision='fp8-{recipe}' contradicts Float8Training({callback.recipe!r}) among the callbacks. Take"
                " precision='fp8', which leaves the recipe to the callback."
            )
        return list(callbacks)
    return [*callbacks, Float8Training(recipe or "tensorwise")]


FP8 = OfferedPrecision("bf16-mixed", _with_float8)
FP8_TRUE = OfferedPrecision("bf16-true", _with_float8)
FP8_ROWWISE = OfferedPrecision("bf16-mixed", partial(_with_float8, recipe="rowwise"))
