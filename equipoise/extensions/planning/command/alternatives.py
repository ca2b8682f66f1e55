"""Settings that need less memory: lower precision, activation checkpointing, and frozen weights in four bits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import nn

from equipoise.extensions.planning.description.layers import has_frozen_layers, repeated_blocks
from equipoise.extensions.planning.description.settings import StepSettings

__all__ = ["Alternative", "alternatives_to"]


class Alternative(NamedTuple):
    """Settings that need less memory than the present ones.

    Attributes:
        settings: The settings.
        overrides: The overrides of a command line that choose them.
    """

    settings: StepSettings
    overrides: Sequence[str]


def alternatives_to(
    settings: StepSettings, module: nn.Module, callbacks: Mapping[str, Any] | None = None
) -> list[Alternative]:
    """Return settings with what needs less memory: each alone, some together, and all of it.

    Args:
        settings: The present settings.
        module: The module, as a plan has changed it.
        callbacks: The configured callbacks by name. Default: none.
    """
    # 1. What can be changed.
    present = Alternative(settings, ())
    low = _with_precision(present)
    recomputed = _with_checkpointing(present, module)
    both = _with_checkpointing(low, module)
    alternatives = [low, recomputed, both]
    if not settings.callbacks and has_frozen_layers(module) and find_spec("bitsandbytes") is not None:
        names = [*(callbacks or {}), "quantization"]
        alternatives += [_with_quantized_weights(alternative, names) for alternative in (present, both)]

    # 2. Each of them once.
    different: dict[tuple[str, ...], Alternative] = {}
    for alternative in alternatives:
        if alternative.overrides:
            different[tuple(alternative.overrides)] = alternative
    return list(different.values())


def _with_precision(before: Alternative) -> Alternative:
    if before.settings.precision not in ("32-true", "32", 32):
        return before
    lower = replace(before.settings, precision="bf16-mixed")
    return Alternative(lower, [*before.overrides, "trainer.precision=bf16-mixed"])


def _with_checkpointing(before: Alternative, module: nn.Module) -> Alternative:
    patterns = tuple(repeated_blocks(module))
    if before.settings.activation_checkpointing or not patterns:
        return before
    changed = replace(before.settings, activation_checkpointing=patterns)
    names = ",".join(patterns)
    return Alternative(changed, [*before.overrides, f"trainer.activation_checkpointing=[{names}]"])


def _with_quantized_weights(before: Alternative, names: Sequence[str]) -> Alternative:
    """Return settings with frozen weights in four bits.

    Args:
        before: The settings without.
        names: The names of all callbacks, since a list replaces the configured one.
    """
    from equipoise.extensions.quantization.quantization import Quantization

    changed = replace(before.settings, callbacks=(Quantization("nf4"),))
    return Alternative(changed, [f"callbacks=[{','.join(names)}]", *before.overrides])
