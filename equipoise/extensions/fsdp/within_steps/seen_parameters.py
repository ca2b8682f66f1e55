"""Parameters as the user's code sees them: shards, and whole ones while their unit is gathered.

Torch shows either the one or the other, as different objects. Here both stand for one parameter: what is changed in the
whole one reaches the shard before the whole one is freed, both have the gradient of the shard, and a whole one that the
user has kept after it was freed means the shard.

Each of the two objects changes its class with what is known of it; `own_functions` calls torch's own behaviour.

| moment | the shard | the whole one |
| --- | --- | --- |
| outside of a step | `Shard` | `FreedParameter` |
| in a step, freed | `ShardInStep` | `FreedParameter` |
| while torch gathers it | `Shard` | `WholeParameter` |
| in a step, gathered | `ShardInStep` | `WholeParameter` |
| freed but for shards over some processes | `PartlyFreed`, another object of torch's | `FreedParameter` |
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from equipoise.errors import StepError
from equipoise.extensions.fsdp.mesh.grid import copy_marks, part_of
from equipoise.extensions.fsdp.state.gathering import gather_whole
from equipoise.extensions.fsdp.within_steps.in_place import IN_PLACE, RANDOM, VIEWS, override
from equipoise.extensions.fsdp.within_steps.whole_results import Mean, compute_whole, gathered, part_like, sum_gradient
from equipoise.interop.torch.autograd import is_in_backward_or_compiler, version_of
from equipoise.interop.torch.dispatch import change_class, own_functions
from equipoise.tree import map_leaves, tensors_in

__all__ = ["FreedParameter", "PartlyFreed", "Seen", "Shard", "ShardInStep", "WholeParameter", "hook_whole"]


class Steps(Protocol):
    """The user's steps, as a parameter sees them.

    Attributes:
        is_in_step: True within a step of the user.
    """

    is_in_step: bool

    def mean_gradient(self, gradient: Tensor, shard: Any) -> Tensor:
        """Return the mean over all processes of a gradient."""

    def mean(self, gradient: Tensor, shard: Any) -> Tensor:
        """Return the mean over all processes of a gradient; in automatic optimisation the sum."""

    def check_assigned(self, gradient: Tensor, shard: Any) -> None:
        """Check that a whole gradient that is assigned is the same in all processes."""


class Seen:
    """One parameter in its two forms.

    Args:
        shard: The parameter in shards, which the optimiser has.
        whole_parameter: The gathered one, whose memory torch frees and fills again.
        steps: The user's steps.
    """

    def __init__(self, shard: Any, whole_parameter: Any, steps: Steps) -> None:
        self.shard = shard
        self.whole = whole_parameter
        self.steps = steps
        self.is_gathered = False
        # True: the whole one may have been changed without a trace.
        self.is_touched = False
        self._version = version_of(whole_parameter)
        change_class(shard, Shard, _seen=self)
        change_class(whole_parameter, FreedParameter, _seen=self)

    def note_gathering(self) -> None:
        """Let torch see both as they are."""
        change_class(self.shard, Shard)
        change_class(self.whole, WholeParameter)

    def note_gathered(self) -> None:
        """Note that the whole one has the values of the shards."""
        self.is_gathered = True
        self.is_touched = False
        self._version = version_of(self.whole)
        self.enter(self.steps.is_in_step)

    def note_freed(self) -> None:
        """Let the shard stand for the whole one."""
        self.is_gathered = False
        change_class(self.whole, FreedParameter)

    def enter(self, is_in_step: bool) -> None:
        """Let the shard be one of a step, or of other code."""
        change_class(self.shard, ShardInStep if is_in_step else Shard)

    @torch.no_grad()
    def keep_changes(self) -> None:
        """Write to the shard what was changed in the whole one."""
        version = version_of(self.whole)
        if self.is_touched or version != self._version:
            part_of(self.shard).copy_(part_like(self.shard, self.whole))
            self.is_touched = False
            self._version = version

    @torch.no_grad()
    def gather_again(self) -> None:
        """Write the values of all shards to the whole one, if it is there."""
        if self.is_gathered:
            self.whole.copy_(gather_whole(self.shard))
            self._version = version_of(self.whole)

    def set_gradient(self, value: Any) -> None:
        """Give the shard a gradient.

        Args:
            value: A gradient in shards; None; or a whole one, which all processes have alike.

        Raises:
            StepError: If it is whole, and differs between the processes, or the optimisation is automatic.
        """
        if value is not None and not isinstance(value, DTensor):
            self.steps.check_assigned(value, self.shard)
            own = torch.zeros_like(self.shard.detach())
            part_of(own).copy_(part_like(own, value))
            value = own
        _set_own_gradient(self.shard, value)


# The attributes of a tensor itself.
_grad: Any = Tensor.grad
_data: Any = Tensor.data


def _own_gradient(parameter: Tensor) -> Any:
    """Return torch's gradient of a tensor."""
    with own_functions():
        return _grad.__get__(parameter)


def _set_own_gradient(parameter: Tensor, value: Any) -> None:
    with own_functions():
        _grad.__set__(parameter, value)


def _own_data(parameter: Tensor) -> Any:
    with own_functions():
        return _data.__get__(parameter)


def hook_whole(whole_parameter: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Register a hook on a whole parameter, for which the user's code may see a shard.

    Args:
        whole_parameter: The parameter, which requires gradients.
        hook: Called with its gradient of the samples of this process.
    """
    with own_functions():
        handle: RemovableHandle = Tensor.register_hook(whole_parameter, hook)  # type: ignore[no-untyped-call]
    return handle


def _reduced(parameter: Any, plain: Any, protocol: Any) -> Any:
    """Return what a pickle has of a parameter: a plain tensor, which belongs to no run."""
    with own_functions():
        plain.requires_grad_(parameter.requires_grad)
        copy_marks(plain, parameter)
        vars(plain).pop("_seen", None)
        return plain.__reduce_ex__(protocol)


def _replace(parameter: Any, value: Tensor) -> None:
    """Write values to a parameter to whose `data` they are assigned."""
    if value.shape != parameter.shape or value.dtype != parameter.dtype:
        raise StepError(
            f"A parameter of shape {list(parameter.shape)} and {parameter.dtype} keeps both under strategy='fsdp', but"
            f" `data` of shape {list(value.shape)} and {value.dtype} was assigned. Assign values alike."
        )
    with torch.no_grad():
        parameter.copy_(value)


# What torch computes of no tensor in shards.
_NOT_IN_SHARDS = ("__setitem__", "__ifloordiv__", "floor_divide_")


def _on_shard(name: str, inherited: Any) -> Any:
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_mixed = any(operand.ndim and not isinstance(operand, DTensor) for operand in tensors_in((args, kwargs)))
        if is_mixed or name in RANDOM or name in _NOT_IN_SHARDS:
            _check_in_place(self)
            # Each process computes the whole result, and keeps its part.
            compute_whole(getattr(Tensor, name), (self, *args), kwargs, sum_gradient)
        else:
            inherited(self, *args, **kwargs)
        if self._seen is not None:
            self._seen.gather_again()
        return self

    return change


def _check_in_place(parameter: Tensor) -> None:
    """Raise torch's error where a leaf of a graph would be changed; the whole tensor would be none."""
    if parameter.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")


def _no_hook(name: str, inherited: Any) -> Any:
    def refuse(self: Any, hook: Any) -> Any:
        raise StepError(
            f"`{name}` of a parameter would see the gradient of this process's samples alone under strategy='fsdp'."
            " Change gradients after the backward: in `on_after_backward`, in `on_before_optimizer_step`, or, in manual"
            " optimisation, between the backward and the step."
        )

    return refuse


_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


def _by_element(name: str, inherited: Any) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise StepError(
            f"`{name}` calls a function for each element, and under strategy='fsdp' a process has a part of them here."
            " Compute the whole, and write it: `weight.copy_(function(weight))`."
        )

    return refuse


@override(_HOOKS, _no_hook)
@override(("apply_", "map_"), _by_element)
@override(IN_PLACE, _on_shard)
class Shard(DTensor):
    """A parameter in shards, its data, or its gradient.

    Operations in place take whole tensors as well, and random numbers are drawn for the whole.
    """

    # None: these are data or a gradient, and no parameter.
    _seen: Seen | None = None

    @property
    def data(self) -> Any:
        """Return the values, which belong to no graph."""
        return self._alias(_own_data(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        # Torch would exchange the tensor, and not the shard in it.
        _replace(self, value)

    def detach(self) -> Any:
        """Return the values, which belong to no graph."""
        with own_functions():
            return self._alias(Tensor.detach(self))

    def _alias(self, values: Tensor) -> Any:
        """Return values that are those of this tensor: what changes them changes the parameter."""
        change_class(values, type(self), _seen=self._seen)
        return values

    @property
    def grad(self) -> Any:
        """Return the gradient in shards."""
        gradient = _own_gradient(self)
        if isinstance(gradient, DTensor):
            change_class(gradient, type(self))
        return gradient

    @grad.setter
    def grad(self, value: Any) -> None:
        forms = _forms_of(self)
        if forms is None:
            _set_own_gradient(self, value)
        else:
            forms.set_gradient(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with own_functions():
            # A copy that is made within a step computes there.
            is_whole = self._seen is not None and self._seen.steps.is_in_step
            copied: Any = gather_whole(self) if is_whole else self.detach().clone()
            if self._seen is not None:
                copied = nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with own_functions():
            plain = Tensor.detach(self)
        return _reduced(self, plain, protocol)


class ShardInStep(Shard):
    """A tensor in shards within a step, which is gathered where the user's code computes with it."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        with own_functions():
            if name in _OF_SHARDS:
                return _in_step(function(*args, **kwargs))
            if function in (torch.autograd.backward, torch.autograd.grad):
                args, kwargs = map_leaves(_leaf_of_graph, (args, kwargs))
                return function(*args, **kwargs)
            tensors = list(tensors_in((args, kwargs)))
            if not _needs_wholes(name, tensors):
                try:
                    result = function(*args, **kwargs)
                except (RuntimeError, NotImplementedError):
                    # Some operations have no form for shards. Another error is raised below once more.
                    pass
                else:
                    # Torch returns a copy where a view would cross shards; the whole has the view that is meant.
                    if name not in VIEWS or _is_view(result, tensors[0]):
                        return _result_in_step(name, result, tensors)
            args, kwargs = map_leaves(_gathered_parameter, (args, kwargs))
            result = compute_whole(function, args, kwargs, _mean_for(tensors))
            return _result_in_step(name, result, tensors)


def _mean_for(tensors: list[Tensor]) -> Mean:
    """Return what averages gradients of tensors over the processes."""
    for tensor in tensors:
        if isinstance(tensor, Shard) and tensor._seen is not None:
            return tensor._seen.steps.mean
    return sum_gradient


# Attributes, and what shows the shards as they are.
_OF_SHARDS = frozenset(
    (
        *("__get__", "__set__", "__delete__", "detach", "to_local", "full_tensor", "redistribute", "requires_grad_"),
        *("size", "dim", "numel", "stride", "__len__", "is_floating_point", "is_complex", "__repr__", "__hash__"),
    )
)


def _needs_wholes(name: str, tensors: list[Tensor]) -> bool:
    """Return True if a function of these tensors is computed on whole ones."""
    # Torch takes numbers, which have no dimensions, beside shards.
    is_mixed = any(tensor.ndim and not isinstance(tensor, DTensor) for tensor in tensors)
    has_graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return is_mixed or has_graph or name in RANDOM or name == "__getitem__"


def _is_view(result: Any, tensor: Any) -> bool:
    """Return True if all results are views of the shard of a tensor, and no copies."""
    memory = part_of(tensor).untyped_storage().data_ptr()
    return all(part_of(view).untyped_storage().data_ptr() == memory for view in tensors_in(result))


def _result_in_step(name: str, result: Any, tensors: list[Tensor]) -> Any:
    """Let results in shards be those of a step, and gather parameters again that were changed in place."""
    if name.endswith("_"):
        for tensor in tensors:
            if isinstance(tensor, Shard) and tensor._seen is not None:
                tensor._seen.gather_again()
    return map_leaves(_in_step, result)


def _in_step(leaf: Any) -> Any:
    if type(leaf) is DTensor:
        change_class(leaf, ShardInStep)
    return leaf


def _gathered_parameter(leaf: Any) -> Any:
    """Return the whole parameter for one in shards that is gathered, unless its values alone are meant."""
    forms = _forms_of(leaf)
    if forms is None or not forms.is_gathered:
        return leaf
    return forms.whole


def _leaf_of_graph(leaf: Any) -> Any:
    """Return the whole parameter for one in shards: the graph has it, even after it was freed."""
    forms = _forms_of(leaf)
    if forms is None:
        return leaf
    return forms.whole


def _forms_of(value: Any) -> Seen | None:
    """Return both forms of a parameter in shards; None for other values, such as the parameter's data."""
    if isinstance(value, Shard) and value._seen is not None and value._seen.shard is value:
        return value._seen
    return None


def _partly_freed(name: str, inherited: Any) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise StepError(
            "Between its forward and its backward, a weight lies in shards over some processes alone under"
            " FSDPStrategy(reshard_after_forward=...), which are only read. Change it before the forward or after the"
            " backward."
        )

    return refuse


@override(IN_PLACE, _partly_freed)
class PartlyFreed(DTensor):
    """A parameter that lies in shards over some processes between its forward and its backward, which is only read."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        with own_functions():
            return _reduced(self, Tensor.detach(self), protocol)


def _on_whole(name: str, inherited: Any) -> Any:
    def change(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._seen.is_gathered:
            return getattr(self._seen.shard, name)(*args, **kwargs)
        return inherited(self, *gathered(args), **gathered(kwargs))

    return change


@override(_HOOKS, _no_hook)
@override(IN_PLACE, _on_whole)
class WholeParameter(nn.Parameter):
    """A gathered parameter. Operations in place take tensors in shards as well."""

    _seen: Seen

    @property
    def data(self) -> Any:
        """Return the values, which belong to no graph."""
        if not self._seen.is_gathered:
            return self._seen.shard.data
        # Torch counts no changes of what this returns.
        self._seen.is_touched = True
        return _own_data(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _replace(self, value)

    def detach(self) -> Any:
        """Return the values, which belong to no graph."""
        if not self._seen.is_gathered:
            return self._seen.shard.detach()
        # Torch counts no changes by `apply_`, nor of the array that `numpy()` of this returns.
        self._seen.is_touched = True
        with own_functions():
            return super().detach()

    @property
    def grad(self) -> Any:
        """Return the gradient in shards."""
        # Torch sums gradients here until it exchanges them.
        return _own_gradient(self) if is_in_backward_or_compiler() else self._seen.shard.grad

    @grad.setter
    def grad(self, value: Any) -> None:
        if is_in_backward_or_compiler():
            _set_own_gradient(self, value)
        else:
            self._seen.set_gradient(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        values = _own_data(self).clone() if self._seen.is_gathered else gather_whole(self._seen.shard)
        copied = nn.Parameter(values, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self._seen.is_gathered:
            return self._seen.shard.__reduce_ex__(protocol)
        return _reduced(self, nn.Parameter(_own_data(self)), protocol)


class FreedParameter(WholeParameter):
    """A parameter that was gathered, and is in shards again: the shard stands for it."""

    def untyped_storage(self) -> Any:
        """Return the parameter's own memory, which is empty. That of the shard is counted with the shard."""
        with own_functions():
            return super().untyped_storage()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_leaves(_shard, (args, kwargs or {}))
        return function(*args, **kwargs)


def _shard(leaf: Any) -> Any:
    return leaf._seen.shard if isinstance(leaf, FreedParameter) else leaf
