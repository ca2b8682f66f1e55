"""A backward whose recomputed forwards run in the modes of torch's functions; torch ends these around `backward`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equipoise.interop.adapters import find_if_tested

__all__ = ["run_backward_in_modes"]

_engine_run_backward: Callable[..., Any] | None = find_if_tested("torch", "torch.autograd.graph._engine_run_backward")


def run_backward_in_modes(loss: Tensor, gradient: Tensor | None = None) -> None:
    """Run a backward of a scalar loss whose recomputed forwards run in the modes of now; nothing public keeps these.

    Args:
        loss: A tensor without dimensions.
        gradient: The gradient with which the backward begins. Default: None, which is 1.
    """
    if _engine_run_backward is None:
        loss.backward(gradient)  # type: ignore[no-untyped-call]
        return
    # A thread of autograd would have no modes.
    with torch.autograd.set_multithreading_enabled(False):
        seed = torch.ones_like(loss) if gradient is None else gradient
        _engine_run_backward((loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True)
