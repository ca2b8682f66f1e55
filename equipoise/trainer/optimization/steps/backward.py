"""The backward of a loss, with its hooks, the scaler and the user's override."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from equipoise.errors import StepError
from equipoise.interop.torch.autograd import is_changed, run_backward
from equipoise.precision import Precision
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.hooks.hooks import Hooks

__all__ = ["Backward"]

# Parts of torch's messages, and what usually causes the error.
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

# Number of seeds that are kept: the even share, and those of a ragged end. Unequal weights have ever new ones.
_MOST_SEEDS = 8


class _Seed(NamedTuple):
    """The gradient with which a backward begins, for a part's share of its window."""

    share: float
    dtype: torch.dtype | None
    device: torch.device | None
    tensor: Any


class Backward:
    """Run `on_before_backward`, the backward, and `on_after_backward`.

    The share of a part in its window enters as the gradient of the loss. That needs no division node, and has the bits
    of `(loss / n).backward()`. The loss is divided instead where a hook or the user's `backward` can see it.

    Attributes:
        before_hook: Called before `on_after_backward`, when the gradients are there; None: nothing is.
        is_seen: Whether methods of the user see gradients as soon as a backward has ended.
    """

    def __init__(self, strategy: Strategy, hooks: Hooks, precision: Precision) -> None:
        self._scaler = precision.scaler

        # 1. The hooks, the user's `backward`, and the strategy's.
        self._before = hooks.bind("on_before_backward")
        self._after = self._after_window = hooks.bind("on_after_backward")
        self.before_hook: Callable[[], None] | None = None
        self._user_backward = hooks.bind_module("backward")
        action = hooks.action_of_strategy("backward")
        self._backward = hooks.profiled(strategy.backward, action)
        self._shows_loss = self._before is not None or self._user_backward is not None
        self._collect: Callable[[], None] | None = None
        if type(strategy).collect_gradients is not Strategy.collect_gradients:
            self._collect = hooks.wrapped(strategy.collect_gradients, hooks.action_of_strategy("collect_gradients"))

        # 2. Whether the backward is the tensor's own.
        is_default = type(strategy).backward is Strategy.backward and not hooks.is_profiled
        self._plain_backward = hooks.wrapped(run_backward, action)
        self._is_plain = is_default and self._user_backward is None and self._scaler is None
        self._is_followed = self._collect is not None or self._after is not None
        self.is_seen = self._after is not None or self._user_backward is not None

        # 3. Seeds by share, dtype and device; the last one is mostly the next one, too.
        self._last_seed = _Seed(math.nan, None, None, None)
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, loss: Tensor, share: float | Tensor | None = None, parts: int = 1) -> None:
        """Run the backward of a part.

        Args:
            loss: The mean loss of the part.
            share: Its factor in the window; None stands for 1.
            parts: The nominal number of parts of the window.
        """
        # 1. The share enters the loss if a hook or the user's `backward` sees it.
        if self._shows_loss and share is not None:
            loss = _shared(loss, share, parts)
            share = None

        # 2. The tensor's own backward.
        if self._is_plain and not loss.ndim and loss.is_floating_point():
            if self._before is not None:
                self._before(loss)
                # Always a new one: a hook on the loss may write into it without a trace.
                seed = torch.ones_like(loss, requires_grad=False)
            else:
                # The seed of the last part, if it is the same.
                if share is None:
                    share = 1.0
                last_share, dtype, device, seed = self._last_seed
                is_same_share = type(share) is float and share == last_share
                if not is_same_share or dtype is not loss.dtype or device != loss.device or is_changed(seed):
                    seed = self._seed(loss, share)
            try:
                self._plain_backward(loss, seed)
            except RuntimeError as error:
                _explain(loss, error)
                raise
            if self._is_followed:
                self._follow()
            return

        # 3. Any other backward.
        arguments: tuple[Tensor, ...] = ()
        if share is not None:
            # Torch accepts a seed for each element of a loss that is no scalar.
            if loss.ndim:
                _check_scalar(loss)
            arguments = (self._seed(loss, share),)
        self._run(loss, arguments, {})

    def watch(self, read_by: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> None:
        """Watch the user's methods that run before the processes have all gradients; see `UnfinishedGradients`."""
        if self._user_backward is not None:
            self._user_backward = read_by(self._user_backward, "backward")
        if self._after is not None:
            self._after = read_by(self._after, "on_after_backward")

    @contextmanager
    def follow_later(self) -> Iterator[Callable[[], None]]:
        """Leave out `on_after_backward` within the context; what it yields calls the hook, if there was a backward."""
        after = self._after
        backwards: list[None] = []

        def follow() -> None:
            if self._after_window is not None and backwards:
                self._after_window()

        if after is not None:
            self._after = lambda: backwards.append(None)
        try:
            yield follow
        finally:
            self._after = after

    def manual(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward that the user calls as `manual_backward`.

        Raises:
            StepError: If the loss is no tensor.
        """
        if not isinstance(loss, Tensor):
            raise StepError(
                f"`manual_backward` takes the loss as a tensor, not {loss!r} of type {type(loss).__name__}."
            )
        self._run(loss, args, kwargs)

    def first_gradient(self, loss: Tensor, share: float | Tensor | None) -> Tensor | None:
        """Return the gradient with which the backward of a part begins; None stands for 1.

        Args:
            loss: A loss of the same dtype and device.
            share: The part's factor in the window; None stands for 1.
        """
        if self._scaler is not None:
            seed = self._seed(loss, 1.0 if share is None else share)
            scaled: Tensor = self._scaler.scale(seed)
            return scaled
        if share is None:
            return None
        return self._seed(loss, share)

    def _run(self, loss: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        if self._before is not None:
            self._before(loss)
        try:
            if self._user_backward is not None:
                self._user_backward(loss, *args, **kwargs)
            else:
                self._backward(loss, *args, **kwargs)
        except RuntimeError as error:
            _explain(loss, error)
            raise
        self._follow()

    def _follow(self) -> None:
        if self._collect is not None:
            self._collect()
        if self._after is not None:
            if self.before_hook is not None:
                self.before_hook()
            self._after()

    def _seed(self, loss: Tensor, share: float | Tensor) -> Tensor:
        if isinstance(share, Tensor):
            return share.to(loss).expand_as(loss)
        key = (share, loss.dtype, loss.device)
        seed = self._seeds.get(key)
        # A hook on the loss may have changed the seed in place.
        if seed is None or is_changed(seed):
            seed = torch.full_like(loss, share, requires_grad=False)
            if key in self._seeds or len(self._seeds) < _MOST_SEEDS:
                self._seeds[key] = seed
        self._last_seed = _Seed(share, loss.dtype, loss.device, seed)
        return seed


def _shared(loss: Tensor, share: float | Tensor, parts: int) -> Tensor:
    """Return the share of a loss in its window; see `Backward.__call__`."""
    if loss.ndim:
        _check_scalar(loss)
    if isinstance(share, float) and share == 1 / parts:
        return loss / parts
    return loss * share


def _check_scalar(loss: Tensor) -> None:
    """Check that a loss has one element."""
    if loss.numel() != 1:
        raise StepError(
            f"The loss must be a scalar, but is of shape {list(loss.shape)}. Reduce it over the samples, for"
            " instance with `.mean()`."
        )


def _explain(loss: Tensor, error: RuntimeError) -> None:
    """Raise an error that names the cause, or add a note, if the loss caused the error of a backward."""
    try:
        _check_scalar(loss)
    except StepError as cause:
        raise cause from error
    for sign, note in _NOTES.items():
        if sign in str(error):
            error.add_note(note)
    if not loss.requires_grad:
        raise StepError(
            "The loss is not connected to any parameter: it has no graph. Was it detached, read with `.item()`, or"
            " computed under"
            " `torch.no_grad()`? Are all parameters frozen?"
        ) from error
