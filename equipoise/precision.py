"""Precisions: dtypes of the module, its input and its arithmetic, under Lightning's names.

Three kinds, and a mixture:

    32-true                          nothing to do
    64-true, 16-true, bf16-true      the module, its input and the default dtype are converted; no scaler
    16-mixed, bf16-mixed             the module stays as it is; forward runs under autocast; 16-mixed scales the loss
    16-true-norm32                   16-true, but normalisation layers compute in float32

In a step the input is converted first, forward runs inside `forward_context`, backward outside of it. With a scaler:
`scaler.scale(loss)`, backward, `scaler.unscale_(optimizer)`, clipping, `scaler.step(optimizer)`, `scaler.update()`.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, final

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from equipoise.errors import ConfigurationError
from equipoise.names.extensions import load_extension, names_of_extensions

if TYPE_CHECKING:
    from equipoise.names.precisions import OfferedPrecision

__all__ = ["SHORT_NAMES", "AutocastRegions", "Precision", "core_precision", "make_precision", "wide_dtype"]

_DTYPES = {
    "32-true": torch.float32,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "16-true-norm32": torch.float16,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
}
# The extensions that offer more names.
_KIND = "precisions"
SHORT_NAMES = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}


@final
class Precision:
    """Converts a module and its input, and provides the context of its forward and the scaler of its loss.

    `make_precision` creates it from a name.

    Args:
        name: Its full name, such as "16-mixed".
        checkpoint_key: The name of Lightning's plugin for it, under which checkpoints save its state.
            Default: "Precision".
        dtype: The dtype of the module, its input, and tensors created in forward. Default: None, no conversion.
        norm32: Whether normalisation layers stay in float32 if `dtype` is another. Default: False.
        autocast: Returns the context of forward; replaces `dtype`. Default: None.
        scaler: Scales the loss. Default: None.

    Attributes:
        core: The same name; for a precision of an extension, that of the precision on which it stands.
        complete: Returns the callbacks of a run with those that a precision of an extension needs, from the user's.
            None for all others.
        autocast: Type of device and dtype of the mixed precision; None if there is none.
        convert_input: Converts the floating tensors of a nested batch; None if there is nothing to convert.
        forward_context: Returns the context of one forward; None if forward needs none.

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
        self.core = name
        self.complete: Callable[[Sequence[Any]], list[Any]] | None = None
        self.checkpoint_key = checkpoint_key
        self.scaler = scaler
        self._dtype = dtype
        self._norm32 = norm32
        self.convert_input: Callable[[Any], Any] | None = None
        self.forward_context = autocast
        self.autocast: tuple[str, torch.dtype] | None = None
        if isinstance(autocast, AutocastRegions):
            self.autocast = (autocast.device_type, autocast.dtype)
        if dtype is not None:
            self.convert_input = partial(_cast_input, dtype=dtype)
            self.forward_context = _DefaultDtype(dtype)

    @property
    def widens(self) -> bool:
        """True if the conversion of a module rounds no value: that to float64."""
        return self._dtype is torch.float64

    def convert_module(self, module: nn.Module) -> None:
        """Convert floating parameters and buffers in place; nothing for 32-true and the mixed precisions.

        Under 16-true-norm32 every normalisation layer keeps its parameters and statistics in float32. It computes in
        float32 and returns its output in the dtype of the input. Normalisation layers are torch's own, and modules
        without children that have floating parameters and "norm" in the name of their class. Normalisation that a
        forward calls as a function is not included. The conversion may be repeated; one to another precision removes
        the hooks of these layers.

        Args:
            module: The module.
        """
        _release_norms(module)
        if self._dtype is None:
            return
        if self.widens:
            # As in Lightning: `to` would convert the states of metrics, too.
            module.double()
            return
        if self._norm32:
            self._convert_all_but_norms(module)
        else:
            module.to(self._dtype)

    def _convert_all_but_norms(self, module: nn.Module) -> None:
        # 1. Keep the values of the normalisation layers, because the conversion below would round them.
        norms = [child for child in module.modules() if _is_norm(child, module)]
        norm_values = [[tensor.detach().to(torch.float32) for tensor in _floats_of(norm)] for norm in norms]

        # 2. Convert the module immediately: modules may override `to`.
        module.to(self._dtype)

        # 3. Convert these layers back.
        for norm, values in zip(norms, norm_values, strict=True):
            norm.to(torch.float32)
            with torch.no_grad():
                for tensor, value in zip(_floats_of(norm), values, strict=True):
                    tensor.copy_(value)
            _hold_norm(norm)

    def init_context(self) -> AbstractContextManager[Any]:
        """Return the context of `configure_model`, in which floating tensors are created in the precision's dtype."""
        if self._dtype is None:
            return nullcontext()
        return _DefaultDtype(self._dtype)

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty if there is no scaler."""
        if self.scaler is None:
            return {}
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scaler's state; an empty one, as of a precision without a scaler, changes nothing."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def make_precision(value: str | int | None, device_type: str, scaler: GradScaler | None = None) -> Precision:
    """Return the precision of a name.

    Args:
        value: "32-true" (or "32", 32, None), "16-mixed" ("16", 16), "bf16-mixed" ("bf16"), "16-true", "16-true-norm32",
            "bf16-true" or "64-true" ("64", 64), or a name that an extension offers; see `OfferedPrecision`.
        device_type: The type of the devices, such as "cpu" or "cuda".
        scaler: The scaler of the loss under 16-mixed. Default: None, one with torch's defaults.

    Raises:
        ConfigurationError: If there is no such precision, or the devices cannot compute in it.

    Example:
        >>> make_precision(16, "cpu").name
        '16-mixed'
    """
    name = _full_name(value)
    offered = _offered(name)
    if offered is None:
        return _in_core(name, device_type, scaler)
    precision = _in_core(offered.core, device_type, scaler)
    precision.name = name
    precision.complete = offered.complete
    return precision


def core_precision(value: str | int | None) -> str:
    """Return the name of the precision of the core on which a precision stands; of those of the core, the full name.

    Args:
        value: A name; see `make_precision`.

    Raises:
        ConfigurationError: If there is no such precision.

    Example:
        >>> core_precision("bf16")
        'bf16-mixed'
    """
    name = _full_name(value)
    offered = _offered(name)
    return name if offered is None else offered.core


def _offered(name: str) -> "OfferedPrecision | None":
    """Return what an extension offers under a full name; None for a name of the core."""
    if name in _DTYPES:
        return None
    offered: OfferedPrecision = load_extension(_KIND, name)
    return offered


def _in_core(name: str, device_type: str, scaler: GradScaler | None) -> Precision:
    """Return a precision of the core; see `make_precision`."""
    dtype = _DTYPES[name]
    if name == "32-true":
        return Precision(name)
    if name.endswith("mixed"):
        # Gradients in float16 underflow without a scaled loss; those in bfloat16 do not.
        if dtype is torch.float16 and scaler is None:
            scaler = GradScaler(device_type)
        # Without a cache, which would keep the cast weights of a step that has ended without backward.
        autocast = AutocastRegions(device_type, dtype)
        return Precision(name, checkpoint_key="MixedPrecision", autocast=autocast, scaler=scaler)
    if dtype is not torch.float64:
        norm32 = name.endswith("norm32")
        return Precision(name, checkpoint_key="HalfPrecision", dtype=dtype, norm32=norm32)
    # float64
    if device_type == "mps":
        raise ConfigurationError(
            f"MPS devices have no float64, but precision={name!r} was given."
            " Use precision='32-true', or accelerator='cpu'."
        )
    return Precision(name, checkpoint_key="DoublePrecision", dtype=dtype)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype of a device: float64, or float32 on MPS, which has no float64.

    Sums of many values are computed in it: in bfloat16, a weight of 257 would become 256.

    Args:
        device: The device.

    Example:
        >>> wide_dtype(torch.device("cpu"))
        torch.float64
    """
    if device.type == "mps":
        return torch.float32
    return torch.float64


def _full_name(value: object) -> str:
    if value is None:
        return "32-true"
    text = repr(value)
    if isinstance(value, str | int):
        text = str(value)
    name = SHORT_NAMES.get(text, text)
    if name in _DTYPES or name in names_of_extensions(_KIND, missing=True):
        return name
    # Few programs need the names of other libraries.
    from equipoise.names.synonyms import FOREIGN_PRECISIONS

    hint = ""
    offered = names_of_extensions(_KIND)
    matches = get_close_matches(text.lower(), [*_DTYPES, *SHORT_NAMES, *FOREIGN_PRECISIONS, *offered], n=1)
    if matches:
        other_names = SHORT_NAMES | FOREIGN_PRECISIONS
        nearest = other_names.get(matches[0], matches[0])
        hint = f" Did you mean {nearest!r}?"
    raise ConfigurationError(
        f"precision is one of {', '.join(map(repr, [*_DTYPES, *offered]))}, or short"
        f" {', '.join(map(repr, SHORT_NAMES))}, but {value!r} was given.{hint}"
    )


def _cast(data: Any, dtype: torch.dtype) -> Any:
    """Convert the floating tensors of a nested collection."""
    if isinstance(data, Tensor):
        if data.is_floating_point():
            return data.to(dtype)
        return data
    return apply_to_collection(data, Tensor, _cast, dtype)


def _cast_input(data: Any, dtype: torch.dtype) -> Any:
    """Convert the floating tensors of a nested batch; what lies in pinned memory does so afterwards.

    From other memory, the copy to a device would wait for the device.
    """
    if not isinstance(data, Tensor):
        return apply_to_collection(data, Tensor, _cast_input, dtype)
    if not data.is_floating_point() or data.dtype == dtype:
        return data
    if data.layout != torch.strided or not data.is_pinned():
        return data.to(dtype)
    return torch.empty_like(data, dtype=dtype, pin_memory=True).copy_(data)


# One thread may enter a region while another leaves one. Between them, neither may see half of the other's change.
_default_dtype_lock = threading.Lock()


class _DefaultDtype(AbstractContextManager["_DefaultDtype"]):
    """Sets torch's default dtype; one object serves any number of regions, also nested ones.

    The default belongs to the process. If regions overlap in several threads, the last to end restores the dtype that
    was the default before the first.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._previous: list[torch.dtype] = []

    def __call__(self) -> "_DefaultDtype":
        return self

    def __enter__(self) -> "_DefaultDtype":
        with _default_dtype_lock:
            # A stack, because regions may be nested.
            self._previous.append(torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *exc: object) -> None:
        with _default_dtype_lock:
            torch.set_default_dtype(self._previous.pop())


class AutocastRegions:
    """Returns autocast regions, and reuses them, because the constructor of a region queries the driver of CUDA.

    A region stores the state before it, so an object serves one region at a time.

    Args:
        device_type: The type of the devices.
        dtype: The dtype in which they compute.
        enabled: Whether autocast is on in the region. Default: True.
        keeps_casts: Whether the cast weights are kept until the end of the region. Default: False.
    """

    def __init__(
        self, device_type: str, dtype: torch.dtype, *, enabled: bool = True, keeps_casts: bool = False
    ) -> None:
        self.device_type = device_type
        self.dtype = dtype
        self.enabled = enabled
        self.keeps_casts = keeps_casts
        self.idle: list[_Region] = []

    def __call__(self) -> "_Region":
        """Return a region in which no thread is."""
        # Without a check before: several threads may call this.
        try:
            return self.idle.pop()
        except IndexError:
            return _Region(self)


class _Region(torch.autocast):
    """An autocast region that becomes idle again at its end."""

    def __init__(self, owner: AutocastRegions) -> None:
        super().__init__(owner.device_type, owner.dtype, owner.enabled, owner.keeps_casts)
        self._owner = owner

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._owner.idle.append(self)


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

# The attribute that marks a layer: copies and pickles contain it, as they contain the hooks.
_HOLD = "equipoise_norm32"


@dataclass
class _Hold:
    """The hooks that keep one normalisation layer in float32.

    Attributes:
        handles: The handles of the hooks.
        dtype: The dtype of the input of the present call.
    """

    handles: tuple[RemovableHandle, ...]
    dtype: torch.dtype = torch.float16


def _is_norm(module: nn.Module, root: nn.Module) -> bool:
    if isinstance(module, _NORM_LAYERS):
        return True
    # Layers of the user: by the name, without containers such as a block with a normalisation in it.
    has_name = "norm" in type(module).__name__.lower()
    if module is root or not has_name:
        return False
    if any(True for _ in module.children()):
        return False
    return any(parameter.is_floating_point() for parameter in module.parameters())


def _floats_of(module: nn.Module) -> list[Tensor]:
    """Return the floating parameters and buffers that have values."""
    return [
        tensor
        for tensor in chain(module.parameters(), module.buffers())
        if tensor.is_floating_point() and not is_lazy(tensor)
    ]


def _hold_norm(norm: nn.Module) -> None:
    before = norm.register_forward_pre_hook(_before_norm, with_kwargs=True)
    # First of all hooks, so that the user's hooks receive the same output as the next layer.
    after = norm.register_forward_hook(_after_norm, prepend=True)
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
    # The first floating tensor decides on the dtype of the output.
    for value in chain(args, kwargs.values()):
        if isinstance(value, Tensor) and value.is_floating_point():
            getattr(norm, _HOLD).dtype = value.dtype
            break
    float_args = tuple(_cast(value, torch.float32) for value in args)
    float_kwargs = {name: _cast(value, torch.float32) for name, value in kwargs.items()}
    return float_args, float_kwargs


def _after_norm(norm: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _cast(output, getattr(norm, _HOLD).dtype)
