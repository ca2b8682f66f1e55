"""Tensors with shapes and no memory, on which a step runs to show what it would allocate.

`FakeTensorMode` lives in `torch._subclasses`, and no public name stands for it. Without it, nothing is predicted: plans
are refused, and `strategy="auto"` does without them.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from equipoise.interop.adapters import find

__all__ = ["FakeTensors", "OnGuess", "is_fake", "usual_tensors"]

# Receives a sentence on what an operation would have read, and what stands for it.
OnGuess = Callable[[str], None]

_FAKE = "torch._subclasses.fake_tensor"
_FakeTensor: Any = find(f"{_FAKE}.FakeTensor") or ()
_unset_fake_temporarily: Any = find(f"{_FAKE}.unset_fake_temporarily")
# Raised where values decide about a result, or about its shape.
_NeedsValue: Any = find(f"{_FAKE}.DataDependentOutputException") or ()
_NeedsShape: Any = find(f"{_FAKE}.DynamicOutputShapeException") or ()
# The class has no types.
_Base: Any = find(f"{_FAKE}.FakeTensorMode") or object


class _FakeMode(_Base):  # type: ignore[misc]
    """Computes shapes only, and takes a bound where the values decide about a shape.

    Args:
        on_guess: Called where a value or a shape is guessed.
    """

    def __init__(self, on_guess: OnGuess) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._on_guess = on_guess

    def __deepcopy__(self, memo: Any) -> "_FakeMode":
        # A copied layer stays a layer of this mode; torch would copy the mode as well.
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            correct = _CORRECTIONS.get(func)
            if correct is None:
                return result
            with self:
                return correct(result, args)
        except _NeedsValue:
            result = self._value(func, args)
            if result is NotImplemented:
                raise
        except _NeedsShape:
            with self:
                result = self._largest(func, args)
            if result is NotImplemented:
                raise
        return result

    def _value(self, func: Any, args: Any) -> Any:
        """Return a value that stands for that of a tensor."""
        if func is not torch.ops.aten._local_scalar_dense.default:
            return NotImplemented
        dtype = args[0].dtype
        value: Any = 1
        if dtype is torch.bool:
            # Questions such as "is a value not finite" are mostly answered by no.
            value = False
        elif dtype.is_floating_point:
            value = 1.0
        self._on_guess(f"the value of a tensor is read, which a trace does not have; it continues with {value}")
        return value

    def _largest(self, func: Any, args: Any) -> Any:
        """Return the result of an operation whose shape depends on values, as large as it can be."""
        result: Any = NotImplemented
        packet = func.overloadpacket
        values = args[0]
        if packet is torch.ops.aten.nonzero:
            result = _positions(values)
        elif packet is torch.ops.aten.masked_select:
            mask = args[1]
            shape = torch.broadcast_shapes(values.shape, mask.shape)  # type: ignore[no-untyped-call]
            result = values.new_empty(shape.numel())
        elif packet is torch.ops.aten.index:
            result = values[_without_masks(args[1])]
        elif packet is torch.ops.aten._unique:
            result = _unique(values, has_counts=False)
        elif packet is torch.ops.aten._unique2:
            result = _unique(values, has_counts=True)
        if result is not NotImplemented:
            name = packet.__name__.strip("_")
            self._on_guess(f"the values decide about the shape of a result ({name}); it is taken as large as it can be")
        return result


def _positions(mask: Tensor) -> Tensor:
    """Return indices of all entries of a mask, as `nonzero` does."""
    return mask.new_empty((mask.numel(), mask.ndim), dtype=torch.int64)


def _without_masks(indices: Any) -> Any:
    """Return indices in which positions stand for masks."""
    result: list[Any] = []
    for index in indices:
        if index is None:
            result.append(slice(None))
        elif index.dtype in (torch.bool, torch.uint8):
            result.extend(_positions(index).unbind(1))
        else:
            result.append(index)
    return tuple(result)


def _unique(values: Tensor, *, has_counts: bool) -> Any:
    """Return the results of `unique` if all values differ."""
    count = values.numel()
    flat = values.new_empty(count)
    inverse = values.new_empty(values.shape, dtype=torch.int64)
    if not has_counts:
        return flat, inverse
    return flat, inverse, values.new_empty(count, dtype=torch.int64)


# Results that differ from those of the CPU's kernels.


def _group_norm(result: Any, args: Any) -> Any:
    """Return the results of a group norm; its statistics have the dtype of the weight, which may be wider."""
    output, mean, deviation = result
    weight = args[1]
    if weight is None or weight.dtype == mean.dtype:
        return result
    mean = torch.empty_like(mean, dtype=weight.dtype)
    deviation = torch.empty_like(deviation, dtype=weight.dtype)
    return output, mean, deviation


def _group_norm_backward(result: Any, args: Any) -> Any:
    """Return the gradients of a group norm; that of the input has the dtype of the input."""
    of_input, *others = result
    dtype = args[1].dtype
    if of_input is None or of_input.dtype == dtype:
        return result
    return torch.empty_like(of_input, dtype=dtype), *others


def _recurrent_layer(result: Any, args: Any) -> Any:
    """Return the results of oneDNN's recurrent layer; the last is its workspace, of which torch does not know the size.

    A small layer tells the bytes of a sample.
    """
    if not torch.is_grad_enabled():
        return result
    *outputs, _ = result
    length, batch_size, width = args[0].shape
    options = args[7:]
    try:
        nbytes_of_sample = _workspace_of_sample(length, width, *options)
    except RuntimeError:
        # The kernel does not take a small layer of this kind.
        return result
    return *outputs, torch.empty(nbytes_of_sample * batch_size, dtype=torch.uint8)


# Samples of the small layer, enough for the rounding of its workspace to hardly count.
_FEW = 8
_workspaces: dict[Any, int] = {}
# Gates of a cell by torch's number of its kind: LSTM and GRU. Others have one.
_GATES = {2: 4, 3: 3}


def _workspace_of_sample(length: int, width: int, *options: Any) -> int:
    """Return the bytes of a recurrent layer's workspace for one sample.

    Args:
        length: Length of the sequences.
        width: Number of features.
        options: Arguments of the operation from `reverse` on.
    """
    key = (length, width, str(options))
    if key in _workspaces:
        return _workspaces[key]
    _, _, mode, size = options[:4]
    rows = _GATES.get(mode, 1) * size
    # Only a layer with a backward has a workspace.
    with usual_tensors(), torch.enable_grad():
        inputs = torch.zeros(length, _FEW, width)
        state = torch.zeros(_FEW, size)
        input_weight = torch.zeros(rows, width)
        recurrent_weight = torch.zeros(rows, size)
        bias = torch.zeros(rows)
        layer = torch.ops.aten.mkldnn_rnn_layer.default
        *_, workspace = layer(inputs, input_weight, recurrent_weight, bias, bias, state, state, *options)
    _workspaces[key] = workspace.nbytes // _FEW
    return _workspaces[key]


# An operator that a build of torch lacks needs no correction.
_CORRECTIONS: dict[Any, Callable[[Any, Any], Any]] = {
    find("torch.ops.aten.native_group_norm.default"): _group_norm,
    find("torch.ops.aten.native_group_norm_backward.default"): _group_norm_backward,
    find("torch.ops.aten.mkldnn_rnn_layer.default"): _recurrent_layer,
}


class FakeTensors:
    """Lets tensors have shapes and no memory.

    Values do not exist. Where a program reads one (`.item()`, `if tensor`), it gets 1, 1.0 or False. Where values
    decide about a shape (a boolean mask), the shape is the largest possible one.

    Args:
        on_guess: Called with a sentence in both cases.

    Example:
        >>> tensors = FakeTensors(print)
        >>> with tensors.active():
        ...     huge = torch.ones(10**6, 10**6) + 1
        >>> huge.nbytes // 10**9
        4000
    """

    def __init__(self, on_guess: OnGuess) -> None:
        self._mode = _FakeMode(on_guess)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let all tensors that are created in a `with` block have no memory. Blocks share their tensors."""
        with warnings.catch_warnings():
            # Copies of tensors compare addresses, which is harmless.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            with self._mode, _swapped_tensors(self._mode):
                yield


@contextlib.contextmanager
def _swapped_tensors(mode: Any) -> Iterator[None]:
    """Let `module.to(...)` convert a module that is being built, as peft does with adapters, in a `with` block.

    Torch swaps the parameters, but none to which a weak reference points, such as those by which the mode finds a
    tensor again. Where a version of torch keeps these elsewhere, such a module cannot be planned.
    """
    swap: Callable[[Tensor, Tensor], None] = torch.utils.swap_tensors

    def forget_and_swap(one: Tensor, other: Tensor) -> None:
        with contextlib.suppress(AttributeError):
            mode.fake_tensor_converter.meta_converter.tensor_memo.clear()
        swap(one, other)

    torch.utils.swap_tensors = forget_and_swap
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


def is_fake(tensor: Tensor) -> bool:
    """Return True for a tensor without memory."""
    return isinstance(tensor, _FakeTensor) or tensor.is_meta


def usual_tensors() -> contextlib.AbstractContextManager[Any]:
    """Return a context whose tensors are torch's own, also among `FakeTensors`."""
    if _unset_fake_temporarily is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = _unset_fake_temporarily()
    return context
