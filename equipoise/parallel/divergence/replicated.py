"""Tensors that several processes hold with the same values, by what a strategy keeps the same."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from equipoise.interop.torch.modules import unsaved_buffers_of

__all__ = ["Replicated", "unchanging_buffers", "whole_module"]

# Buffers of layers that compute statistics of the samples of their process.
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class Replicated:
    """Tensors of this process that others hold as well.

    Attributes:
        parameters: By the part of the module that this process holds, its parameters by their names. All processes
            with a part of the same name have the same values in it.
        buffers: Buffers by their names, of which all processes have the same as long as training changes none of them.
    """

    parameters: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    buffers: Mapping[str, Tensor] = field(default_factory=dict)


def whole_module(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the parameters of a module of which each process has the whole."""
    return {"module": dict(module.named_parameters())}


def unchanging_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that either no process changes in training or all of them do, by their names.

    Left out are those that may follow from the samples of one process: statistics of layers such as BatchNorm, whole
    numbers, which count, and buffers that checkpoints leave out, such as caches that grow with the longest sample.

    Args:
        module: The user's module.
    """
    buffers = {}
    for prefix, part in module.named_modules():
        # The names within the module.
        direct = dict(part.named_buffers(prefix, recurse=False))
        names = {name.rpartition(".")[2]: name for name in direct}
        if not names.keys().isdisjoint(_STATISTICS):
            continue
        for name, full_name in names.items():
            buffer = direct[full_name]
            has_fractions = buffer.is_floating_point() or buffer.is_complex()
            is_saved = name not in unsaved_buffers_of(part)
            if has_fractions and is_saved:
                buffers[full_name] = buffer
    return buffers
