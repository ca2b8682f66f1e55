"""Operations on parameters of other processes: noted in the main process, computed in those that have the values.

A callback that averages the weights computes with each of them by itself: it copies, adds, interpolates. So such an
operation needs no value here, and its result lies where its operands do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from equipoise.extensions.pipeline.messaging.commands import placeholder
from equipoise.extensions.pipeline.messaging.remote_parameters import Unknown, is_elsewhere, origin_of, view_of
from equipoise.tree import leaves_of, map_leaves, tensors_in

__all__ = ["Operation", "RemoteOperations", "compute_operations"]

# A function, its arguments, and the number of each tensor of its result; None for one that it has changed in place.
# Without a function, the result with this number is no longer needed.
Operation = tuple[Any, Any, Any, list[Any]]

# First stages of the processes that have a tensor.
Place = tuple[int, ...]

# A result that a callback has kept from another run has a number that is unknown in this one.
_numbers = count()
_META = torch.device("meta")


class _Operand:
    """A tensor of an operation, as it is sent: a leaf among the arguments, which no data class is.

    Args:
        number: Key of a tensor of the module or of a copy of it, or number of an earlier result.
        is_result: Whether it is an earlier result. Default: False.
    """

    def __init__(self, number: int, *, is_result: bool = False) -> None:
        self.number = number
        self.is_result = is_result


@dataclass(eq=False)
class _Result:
    """Result of an operation."""

    number: int


class RemoteOperations:
    """Operations that wait to be sent.

    Args:
        key_of: Returns the key of a parameter.
        stages_of: Returns the first stages of the workers that have the tensor with a key.
    """

    def __init__(self, key_of: Callable[[Tensor], int | None], stages_of: Callable[[int], Sequence[int]]) -> None:
        self._key_of = key_of
        self._stages_of = stages_of
        # For the number of a result.
        self._places: dict[int, Place] = {}
        self._pending: dict[int, list[Operation]] = {}

    def take(self) -> dict[int, list[Operation]]:
        """Return the operations that wait, for each stage."""
        pending = self._pending
        self._pending = {}
        return pending

    def __call__(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Note an operation, and return its result, which has a shape and no values.

        Raises:
            Unknown: If the operation needs values.
        """
        if function.__name__.startswith("_foreach_"):
            return self._for_each(function, args, kwargs)
        return self._note(function, args, kwargs)

    def _for_each(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Divide an operation on lists of tensors by the processes in which these are."""
        results = list(args[0])
        for place, indices in self._groups_by_place(args).items():
            arguments = [_entries(argument, indices) for argument in args]
            if place:
                results_of_group = self._note(function, arguments, kwargs)
            else:
                results_of_group = function(*arguments, **kwargs)
            if not results_of_group:
                # A change in place may return none.
                results_of_group = arguments[0]
            for index, result in zip(indices, results_of_group, strict=True):
                results[index] = result
        return results

    def _groups_by_place(self, args: Sequence[Any]) -> dict[Place, list[int]]:
        """Return the indices of the entries of lists of tensors, by the processes in which the entries are."""
        groups: dict[Place, list[int]] = {}
        for index in range(len(args[0])):
            arguments = [_entries(argument, [index]) for argument in args]
            groups.setdefault(self._place_of(arguments), []).append(index)
        return groups

    def _place_of(self, arguments: Any) -> Place:
        """Return the processes that compute an operation; none if all tensors among its arguments are in this one."""
        tensors = list(tensors_in(arguments))
        places = {self._place(tensor) for tensor in tensors if is_elsewhere(tensor)}
        if not places:
            return ()
        # Tensors of this process are sent, but the first one may be that which is changed.
        first = tensors[0]
        may_change_here = first.ndim > 0 and not is_elsewhere(first)
        if len(places) > 1 or may_change_here:
            raise Unknown
        return places.pop()

    def _place(self, tensor: Tensor) -> Place:
        operand = self._operand(tensor)
        if operand.is_result:
            return self._places[operand.number]
        return tuple(self._stages_of(operand.number))

    def _operand(self, tensor: Tensor) -> _Operand:
        origin = origin_of(tensor)
        if isinstance(origin, _Result) and origin.number in self._places:
            return _Operand(origin.number, is_result=True)
        key = None
        if isinstance(origin, Tensor):
            key = self._key_of(origin)
        if key is None:
            raise Unknown
        return _Operand(key)

    def _note(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Note an operation whose tensors are in the same processes, and return its result."""
        arguments: list[Any] = [list(args), dict(kwargs)]
        place = self._place_of(arguments)
        device_before = next(tensor.device for tensor in tensors_in(arguments) if is_elsewhere(tensor))
        named_devices = (value for value in leaves_of(arguments) if isinstance(value, torch.device))
        device = next(named_devices, device_before)
        # Without values both devices are one, and torch would return the tensor itself.
        if function is Tensor.to and device != device_before:
            arguments[1]["copy"] = True

        # 1. The shapes of the results. A tensor without values stands for each original, by its identity.
        originals: dict[int, Tensor] = {}
        meta_args, meta_kwargs = map_leaves(partial(_without_values, originals=originals), arguments)
        try:
            shapes = function(*meta_args, **meta_kwargs)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            # It needs values.
            raise Unknown from error
        if function is Tensor.to and id(shapes) in originals:
            return originals[id(shapes)]

        # 2. The results.
        numbers: list[int | None] = []

        def result_of(shape: Any) -> Any:
            if not isinstance(shape, Tensor):
                raise Unknown
            original = originals.get(id(shape))
            if original is None:
                number = next(_numbers)
                numbers.append(number)
                return self._result(number, place, placeholder(shape.shape, shape.dtype).to(device))
            # It was changed in place.
            if not is_elsewhere(original):
                raise Unknown
            numbers.append(None)
            return original

        results = None
        if shapes is not None:
            results = map_leaves(result_of, shapes)

        # 3. The operation.
        sent_args, sent_kwargs = map_leaves(self._encoded, arguments)
        for stage in place:
            self._add(stage, (function, sent_args, sent_kwargs, numbers))
        return results

    def _add(self, stage: int, operation: Operation) -> None:
        self._pending.setdefault(stage, []).append(operation)

    def _result(self, number: int, place: Place, shape: Tensor) -> Tensor:
        """Return the result with a number."""
        result = _Result(number)
        self._places[number] = place
        # All of its views refer to it. Without one, workers free it.
        finalize(result, self._drop, number)
        return view_of(shape, result)

    def _drop(self, number: int) -> None:
        """Let workers free a result to which nothing refers any more."""
        for stage in self._places.pop(number):
            self._add(stage, (None, [], {}, [number]))

    def _encoded(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if is_elsewhere(value):
            return self._operand(value)
        # It may change before it is sent.
        return value.detach().clone()


def _entries(argument: Any, indices: Iterable[int]) -> Any:
    """Return entries of a list; an argument that is none is for all entries."""
    if not isinstance(argument, list | tuple):
        return argument
    return [argument[index] for index in indices]


def _without_values(value: Any, originals: dict[int, Tensor]) -> Any:
    """Return an argument with which shapes of results are computed; `originals` receives tensors without their values.

    A number of this process keeps its value, which torch may read.
    """
    if isinstance(value, torch.device):
        return _META
    if not isinstance(value, Tensor):
        return value
    if not is_elsewhere(value) and not value.ndim:
        return value.detach().cpu()
    shape = torch.empty(value.shape, dtype=value.dtype, device=_META)
    originals[id(shape)] = value
    return shape


def compute_operations(
    operations: Iterable[Operation],
    tensor_of: Callable[[int], Tensor],
    results: dict[int, Tensor],
    device: torch.device,
) -> None:
    """Compute operations in the process where their tensors are.

    Args:
        operations: The operations that `RemoteOperations.take` has returned for this process.
        tensor_of: Returns the tensor with a key.
        results: Earlier results by their numbers; receives the new ones.
        device: The device that stands for that of the main process.
    """

    def decoded(value: Any) -> Any:
        if isinstance(value, _Operand):
            if value.is_result:
                return results[value.number]
            return tensor_of(value.number)
        if isinstance(value, torch.device) and value.type != "cpu":
            return device
        return value

    for function, sent_args, sent_kwargs, numbers in operations:
        if function is None:
            results.pop(numbers[0], None)
            continue
        args, kwargs = _on_one_device(map_leaves(decoded, [sent_args, sent_kwargs]))
        with torch.no_grad():
            result = function(*args, **kwargs)
        # A change in place may return nothing.
        for number, tensor in zip(numbers, tensors_in(result), strict=False):
            if number is not None:
                results[number] = tensor


def _on_one_device(arguments: Any) -> Any:
    """Move tensors to the device of the first: an average may lie on the host."""
    device = next(tensor.device for tensor in tensors_in(arguments))

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return value

    return map_leaves(moved, arguments)
