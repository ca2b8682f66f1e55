"""Precisions: dtypes of the module, its input and its arithmetic, under Lightning's names.

Three kinds, and a mixture of our own:

    32-true                          nothing to do
    64-true, 16-true, bf16-true      the module, its input and the default dtype are converted; no scaler
    16-mixed, bf16-mixed             the module stays as it is; forward runs under autocast; 16-mixed scales the loss
    16-true-norm32                   16-true, but normalisation layers compute in float32

In a step the input is converted first, forward runs inside `forward_context`, backward outside of it. Where there is a
scaler: `scaler.scale(loss)`, backward, `scaler.unscale_(optimizer)`, clipping, `scaler.step(optimizer)`,
`scaler.update()`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import Any, final

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from equipoise.errors import ConfigurationError

__all__ = ["SHORT_NAMES", "Precision", "make_precision"]

_DTYPES = {
    "32-true": torch.float32,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "16-true-norm32": torch.float16,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}
SHORT_NAMES = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
# What other libraries call them: not accepted, but understood well enough to name the right one.
_FOREIGN = {
    "fp16": "16-mixed",
    "float16": "16-mixed",
    "half": "16-true",
    "bfloat16": "bf16-mixed",
    "fp32": "32-true",
    "float32": "32-true",
    "fp64": "64-true",
    "float64": "64-true",
    "double": "64-true",
}


@final
class Precision:
    """What a precision does to a module, its input, its forward and its loss; made by `make_precision`.

    Args:
        name: Its full name, such as "16-mixed".
        checkpoint_key: The name of Lightning's plugin for it, under which checkpoints keep its state.
            Default: "Precision".
        dtype: The dtype of the module, its input, and tensors made in forward. Default: None, which converts nothing.
        norm32: Whether normalisation layers stay in float32 where `dtype` is another. Default: False.
        autocast: Makes the context of forward; takes the place of `dtype`. Default: None.
        scaler: Scales the loss. Default: None.

    Attributes:
        convert_input: Converts the floating tensors of a nested batch; None where there is nothing to convert.
        forward_context: Makes the context of forward, to be entered once; None where none is needed.

    Example:
        >>> precision = make_precision("bf16-true", "cpu")
        >>> module = torch.nn.Linear(2, 1)
        >>> precision.convert_module(module)
        >>> with precision.forward_context():
        ...     module(precision.convert_input(torch.ones(3, 2))).dtype
        torch.bfloat16
    """

    def __init__(
        self,
        name: str,
        *,
        checkpoint_key: str = "Precision",
        dtype: torch.dtype | None = None,
        norm32: bool = False,
        autocast: Callable[[], AbstractContextManager[Any]] | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        self.name = name
        self.checkpoint_key = checkpoint_key
        self.scaler = scaler
        self._dtype = dtype
        self._norm32 = norm32
        self.convert_input: Callable[[Any], Any] | None = None
        self.forward_context = autocast
        if dtype is not None:
            self.convert_input = partial(_cast, dtype=dtype)
            self.forward_context = _DefaultDtype(dtype)

    def convert_module(self, module: nn.Module) -> None:
        """Converts floating parameters and buffers in place; nothing for 32-true and the mixed precisions.

        Under 16-true-norm32 every normalisation layer keeps its parameters and statistics in float32, takes its input
        in float32 and gives its output back in the dtype of the input. These are torch's own layers, and modules
        without children that own floating parameters and have "norm" in the name of their class; normalisation called
        as a function, not as a module, is not found. The conversion may be repeated, and one to another precision takes
        the hooks of these layers away again.
        """
        _release_norms(module)
        if self._dtype is None:
            return
        if self._dtype is torch.float64:
            module.double()  # as Lightning does: `to` would convert the states of metrics, too
            return
        if not self._norm32:
            module.to(self._dtype)
            return
        norms = [child for child in module.modules() if _is_norm(child, module)]
        values = [[tensor.detach().to(torch.float32) for tensor in _floats_of(norm)] for norm in norms]
        module.to(self._dtype)  # as a whole: modules may override what it does
        for norm, before in zip(norms, values, strict=True):
            norm.to(torch.float32)
            with torch.no_grad():
                for tensor, value in zip(_floats_of(norm), before, strict=True):
                    tensor.copy_(value)  # not rounded on the way
            _hold_norm(norm)

    def init_context(self) -> AbstractContextManager[Any]:
        """The context of `configure_model`: floating tensors made in it have the precision's dtype."""
        return nullcontext() if self._dtype is None else _DefaultDtype(self._dtype)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state; empty where there is none."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the scaler's state back; an empty one, as of a precision without a scaler, changes nothing."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def make_precision(value: str | int | None, device_type: str) -> Precision:
    """Makes a precision from its name.

    Args:
        value: "32-true" (or "32", 32, None), "16-mixed" ("16", 16), "bf16-mixed" ("bf16"), "16-true", "16-true-norm32",
            "bf16-true" or "64-true" ("64", 64).
        device_type: The type of the devices, such as "cpu" or "cuda".

    Raises:
        ConfigurationError: If there is no such precision, or the devices cannot compute in it.

    Example:
        >>> make_precision(16, "cpu").name
        '16-mixed'
    """
    name = _full_name(value)
    dtype = _DTYPES[name]
    if name == "32-true":
        return Precision(name)
    if name.endswith("mixed"):
        scaler = GradScaler(device_type) if dtype is torch.float16 else None
        return Precision(name, checkpoint_key="MixedPrecision", autocast=_Autocast(device_type, dtype), scaler=scaler)
    if dtype is not torch.float64:
        return Precision(name, checkpoint_key="HalfPrecision", dtype=dtype, norm32=name.endswith("norm32"))
    if device_type == "mps":
        raise ConfigurationError(
            f"MPS devices have no float64, but precision={value!r} was given."
            " Use precision='32-true', or accelerator='cpu'."
        )
    return Precision(name, checkpoint_key="DoublePrecision", dtype=dtype)


def _full_name(value: object) -> str:
    if value is None:
        return "32-true"
    text = str(value) if isinstance(value, str | int) else repr(value)
    name = SHORT_NAMES.get(text, text)
    if name in _DTYPES:
        return name
    near = get_close_matches(text.lower(), [*_DTYPES, *SHORT_NAMES, *_FOREIGN], n=1)
    hint = f" Did you mean {(SHORT_NAMES | _FOREIGN).get(near[0], near[0])!r}?" if near else ""
    raise ConfigurationError(
        f"precision is one of {', '.join(map(repr, _DTYPES))}, or short {', '.join(map(repr, SHORT_NAMES))},"
        f" but {value!r} was given.{hint}"
    )


def _cast(data: Any, dtype: torch.dtype) -> Any:
    """Converts the floating tensors of a nested collection."""
    if isinstance(data, Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    return apply_to_collection(data, Tensor, _cast, dtype)


class _DefaultDtype(AbstractContextManager["_DefaultDtype"]):
    """Sets torch's default dtype; one object serves any number of regions, one in another.

    The default belongs to the process. Of regions that overlap in several threads the last to end restores what the
    first one found.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._previous: list[torch.dtype] = []

    def __call__(self) -> "_DefaultDtype":
        return self

    def __enter__(self) -> "_DefaultDtype":
        self._previous.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *exc: object) -> None:
        torch.set_default_dtype(self._previous.pop())


class _Autocast:
    """Makes autocast regions, and uses them again: on CUDA a new one asks the driver questions each time.

    A region remembers what it found, so that each object serves one region at a time.
    """

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.idle: list[_Region] = []

    def __call__(self) -> "_Region":
        try:
            return self.idle.pop()
        except IndexError:
            return _Region(self)


class _Region(torch.autocast):
    """An autocast region that goes back to its maker at its end."""

    def __init__(self, maker: _Autocast) -> None:
        # A cache would keep the cast weights of a step that has ended without backward.
        super().__init__(maker.device_type, dtype=maker.dtype, cache_enabled=False)
        self._maker = maker

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._maker.idle.append(self)


# Normalisation in float32.

_NORM_LAYERS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LazyInstanceNorm1d,
    nn.LazyInstanceNorm2d,
    nn.LazyInstanceNorm3d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.CrossMapLRN2d,
)
_HOLD = "equipoise_norm32"  # the attribute that marks a layer: like the hooks, it goes along in a copy and a pickle


@dataclass
class _Hold:
    """What keeps one normalisation layer in float32."""

    handles: tuple[RemovableHandle, ...]
    dtype: torch.dtype = torch.float16  # of the input of the call in progress


def _is_norm(module: nn.Module, root: nn.Module) -> bool:
    if isinstance(module, _NORM_LAYERS):
        return True
    named = module is not root and "norm" in type(module).__name__.lower() and next(module.children(), None) is None
    return named and any(parameter.is_floating_point() for parameter in module.parameters())


def _floats_of(module: nn.Module) -> list[Tensor]:
    """Floating parameters and buffers that have values."""
    return [t for t in chain(module.parameters(), module.buffers()) if t.is_floating_point() and not is_lazy(t)]


def _hold_norm(norm: nn.Module) -> None:
    before = norm.register_forward_pre_hook(_before_norm, with_kwargs=True)
    after = norm.register_forward_hook(_after_norm, prepend=True)  # the user's hooks see what the next layer will
    setattr(norm, _HOLD, _Hold((before, after)))


def _release_norms(module: nn.Module) -> None:
    for submodule in module.modules():
        hold = vars(submodule).pop(_HOLD, None)
        if hold is not None:
            for handle in hold.handles:
                handle.remove()


def _before_norm(
    norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for value in chain(args, kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            getattr(norm, _HOLD).dtype = value.dtype
            break
    return tuple(_cast(value, torch.float32) for value in args), {k: _cast(v, torch.float32) for k, v in kwargs.items()}


def _after_norm(norm: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _cast(output, getattr(norm, _HOLD).dtype)
