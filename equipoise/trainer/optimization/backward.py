"""The backward of a loss, with its hooks, the scaler and the user's override."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.errors import StepError
from equipoise.strategies.strategy import Strategy

if TYPE_CHECKING:
    from equipoise.trainer.runtime.run_context import RunContext

__all__ = ["Backward"]

_NOTES = {
    "backward through the graph a second time": (
        "A tensor that outlives its batch still has its graph, such as a hidden state or a sum of losses that the"
        " module keeps. Keep `tensor.detach()` instead. If the step itself runs a backward, it optimises by hand: set"
        " `self.automatic_optimization = False`."
    ),
    "modified by an inplace operation": (
        "Trainer(detect_anomaly=True) shows the line of the forward whose result was changed. Operations in place end"
        " with an underscore, or are written `x += ...` and `x[...] = ...`."
    ),
}


class Backward:
    """Runs `on_before_backward`, the backward, `on_after_backward`.

    The share of a part in its window enters as the gradient of the loss: no division node, and the bits of `(loss /
    n).backward()`. Where somebody sees the loss, it is divided instead.
    """

    def __init__(self, context: "RunContext") -> None:
        hooks = context.hooks
        self.scaler, self.strategy = context.precision.scaler, context.strategy
        self.before = hooks.bind("on_before_backward")
        self.user_backward = hooks.bind_module("backward")
        self.backward = hooks.profiled(self.strategy.backward, hooks.action_of_strategy("backward"))
        self.after = hooks.bind("on_after_backward")
        collects = type(self.strategy).collect_gradients is not Strategy.collect_gradients
        self.collect = self.strategy.collect_gradients if collects else None
        self.seen = self.before is not None or self.user_backward is not None
        neutral = type(self.strategy).backward is Strategy.backward and not hooks.is_profiled
        seen = self.seen or self.after is not None or self.collect is not None or self.scaler is not None
        self._plain = neutral and not seen  # nothing but the backward itself
        self._last: tuple[float, Any] = (math.nan, None)  # the share of the batch before, and its seed
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, loss: Tensor, share: float | Tensor | None = None, parts: int = 1) -> None:
        """Runs the backward of a part.

        Args:
            loss: The mean loss of the part.
            share: Its factor in the window; None stands for 1.
            parts: The nominal number of parts of the window.
        """
        if self._plain and (share is None or not loss.ndim):
            seen, seed = self._last
            if share is None:
                seed = None
            elif (
                type(share) is not float or share != seen or seed.dtype is not loss.dtype or seed.device != loss.device
            ):
                seed = self._seed(loss, share)
            try:
                loss.backward(seed)  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                _explain(loss, error)
                raise
            return
        seed = None
        if share is not None:
            if loss.ndim:
                _check_scalar(loss)  # a seed for each element would pass
            if self.seen:
                loss = loss / parts if isinstance(share, float) and share == 1 / parts else loss * share
            else:
                seed = self._seed(loss, share)
        self._run(loss, () if seed is None else (seed,), {})

    def manual(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """`manual_backward`."""
        if not isinstance(loss, Tensor):
            raise StepError(
                f"`manual_backward` takes the loss as a tensor, not {loss!r} of type {type(loss).__name__}."
            )
        self._run(loss, args, kwargs)

    def _run(self, loss: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if self.before is not None:
            self.before(loss)
        try:
            if self.user_backward is not None:
                self.user_backward(loss, *args, **kwargs)
            else:
                self.backward(loss, *args, **kwargs)
        except RuntimeError as error:
            _explain(loss, error)
            raise
        if self.collect is not None:
            self.collect()
        if self.after is not None:
            self.after()

    def _seed(self, loss: Tensor, share: float | Tensor) -> Tensor:
        """The share as a tensor like the loss."""
        if isinstance(share, Tensor):
            return share.to(loss).expand_as(loss)
        key = (share, loss.dtype, loss.device)
        seed = self._seeds.get(key)
        if seed is None:
            seed = torch.full_like(loss, share, requires_grad=False)
            if len(self._seeds) < 8:  # the even share and those of a ragged end; unequal weights would fill it for ever
                self._seeds[key] = seed
        self._last = (share, seed)
        return seed


def _check_scalar(loss: Tensor) -> None:
    if loss.numel() != 1:
        raise StepError(
            f"The loss must be a scalar, but is of shape {list(loss.shape)}. Reduce it over the samples, for"
            " instance with `.mean()`."
        )


def _explain(loss: Tensor, error: RuntimeError) -> None:
    """Raises what was wrong with a loss, if it was the loss."""
    try:
        _check_scalar(loss)
    except StepError as better:
        raise better from error
    for sign, note in _NOTES.items():
        if sign in str(error):
            error.add_note(note)
    if not loss.requires_grad:
        raise StepError(
            "The loss is not connected to any parameter: it has no graph. Was it detached, read with `.item()`, or"
            " computed under"
            " `torch.no_grad()`? Are all parameters frozen?"
        ) from error
