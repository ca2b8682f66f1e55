"""The second check: a computation in which all samples draw the same numbers and see no statistics of other samples.

A batch that is computed in parts draws other numbers, and has other means in BatchNorm, than one that is computed
whole. Neither is wrong. If both sides agree once that is left out, all else is right.
"""

from typing import Any

import torch
from torch import Tensor, nn

from equipoise.interop.torch.dispatch import DispatchMode

__all__ = ["DrawsAlike", "without_coupling"]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# The seed of all draws.
_SEED = 1


def without_coupling(module: nn.Module) -> None:
    """Let layers drop nothing, and normalise by running statistics, also in threads of a strategy.

    Args:
        module: A copy of the user's module, which may be left so.
    """
    for part in module.modules():
        if isinstance(part, _NORMS):
            part.eval()
        if "dropout" in type(part).__name__.lower() and isinstance(getattr(part, "p", None), float):
            part.p = 0.0  # type: ignore[assignment]
        for name, value in vars(part).items():
            if "dropout" in name and isinstance(value, float):
                setattr(part, name, 0.0)


class DrawsAlike(DispatchMode):  # type: ignore[misc]
    """Lets each operation that draws random numbers draw those of one sample, and give them to all.

    What is drawn with given probabilities, as by `torch.multinomial`, is what is most probable.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an operation of torch."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(result, Tensor) and result.numel():
            result.copy_(_drawn_alike(func, result, args, kwargs))
        return result


def _drawn_alike(func: Any, drawn: Tensor, args: Any, options: dict[str, Any]) -> Tensor:
    """Return numbers that do not depend on the number of samples, in the place of those that were drawn."""
    name = func.overloadpacket.__name__
    arguments = [arg for arg in args if isinstance(arg, Tensor)]
    if name == "randperm":
        return torch.arange(len(drawn))
    if name == "multinomial":
        return arguments[0].topk(drawn.shape[-1], dim=-1).indices
    if name == "normal" and arguments:
        return arguments[0]
    if name == "bernoulli" or (name == "bernoulli_" and len(arguments) > 1):
        return arguments[-1] > 0.5
    # One row, whose values stand for those of all.
    torch.manual_seed(_SEED)
    row = [_first_row(arg) for arg in args] if drawn.ndim else args
    if "generator" in options:
        options = {**options, "generator": None}
    drawn_row: Tensor = func(*row, **options)
    return drawn_row


def _first_row(arg: Any) -> Any:
    """Return an argument of a draw for one sample: of a size, or of a tensor that is filled."""
    if isinstance(arg, Tensor) and arg.ndim:
        return arg[:1].clone()
    if isinstance(arg, list | tuple) and arg:
        return [1, *arg[1:]]
    return arg
