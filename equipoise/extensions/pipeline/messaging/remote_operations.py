"""Operations on parameters of other processes: noted in the main process, and computed where the values lie.

A callback that averages the weights computes with each of them by itself: it copies, adds, interpolates. So such an
operation needs no value here, and its result lies where its operands do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from equipoise.extensions.pipeline.messaging.commands import placeholder
from equipoise.extensions.pipeline.messaging.remote_parameters import Unknown, is_elsewhere, origin_of, view_of
from equipoise.tree import leaves_of, map_leaves

__all__ = ["Operation", "RemoteOperations", "compute_operations"]

# A function, its arguments, and the number of each tensor of its result; None for one that it has changed in place.
# Without a function, the result with this number is needed no more.
Operation = tuple[Any, Any, Any, list[Any]]

# First stages of the processes that have a tensor.
Place = tuple[int, ...]

# A result that a callback has kept from another run has a number that is unknown in this one.
_numbers = count()
_META = torch.device("meta")


class _Operand:
    """A tensor of an operation, as it is sent.

    Args:
        number: Key of a tensor of the module or of a copy of it, or number of an earlier result.
        is_result: Whether it is an earlier result.
    """

    def __init__(self, number: int, *, is_result: bool) -> None:
        self.number = number
        self.is_result = is_result


class _Result:
    """Result of an operation, to which all of its views refer. It is freed in the workers when none is left."""

    def __init__(self, number: int) -> None:
        self.number = number


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
        groups: dict[Place, list[int]] = {}
        for index in range(len(args[0])):
            place = self._place_of(leaves_of([_entries(argument, [index]) for argument in args]))
            groups.setdefault(place, []).append(index)
        results = list(args[0])
        for place, indices in groups.items():
            arguments = [_entries(argument, indices) for argument in args]
            if place:
                of_group = self._note(function, arguments, kwargs)
            else:
                of_group = function(*arguments, **kwargs)
            # A change in place may return none.
            for index, result in zip(indices, of_group or arguments[0], strict=True):
                results[index] = result
        return results

    def _place_of(self, values: Iterable[Any]) -> Place:
        """Return where an operation is computed; nothing if all tensors among its arguments are in this process."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        places = {self._place(tensor) for tensor in tensors if is_elsewhere(tensor)}
        if not places:
            return ()
        # Tensors of this process are sent, but the first one may be that which is changed.
        if len(places) > 1 or (tensors[0].ndim and not is_elsewhere(tensors[0])):
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
        return _Operand(key, is_result=False)

    def _note(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        values = list(leaves_of((args, kwargs)))
        place = self._place_of(values)
        # 1. The shapes of the results.
        here = next(value.device for value in values if isinstance(value, Tensor) and is_elsewhere(value))
        device = next((value for value in values if isinstance(value, torch.device)), here)
        if function is Tensor.to and device != here:
            kwargs = {**kwargs, "copy": True}
        originals: dict[int, Tensor] = {}
        shapes = map_leaves(lambda value: _without_values(value, originals), [list(args), dict(kwargs)])
        try:
            result = function(*shapes[0], **shapes[1])
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise Unknown from error
        if function is Tensor.to and id(result) in originals:
            return originals[id(result)]

        # 2. The results.
        numbers: list[Any] = []

        def result_of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                raise Unknown
            # It was changed in place.
            if id(value) in originals:
                if not is_elsewhere(originals[id(value)]):
                    raise Unknown
                numbers.append(None)
                return originals[id(value)]
            numbers.append(next(_numbers))
            return self._result(numbers[-1], place, placeholder(value.shape, value.dtype).to(device))

        results = result
        if result is not None:
            results = map_leaves(result_of, result)

        # 3. The operation.
        encoded = map_leaves(self._encoded, [list(args), dict(kwargs)])
        for stage in place:
            self._pending.setdefault(stage, []).append((function, *encoded, numbers))
        return results

    def _result(self, number: int, place: Place, shape: Tensor) -> Tensor:
        """Return the result with a number."""
        result = _Result(number)
        self._places[number] = place
        finalize(result, self._drop, number)
        return view_of(shape, result)

    def _drop(self, number: int) -> None:
        """Let workers free a result to which nothing refers any more."""
        for stage in self._places.pop(number):
            self._pending.setdefault(stage, []).append((None, [], {}, [number]))

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
        operations: What `RemoteOperations.take` has returned for this process.
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

    for function, args, kwargs, numbers in operations:
        if function is None:
            results.pop(numbers[0], None)
            continue
        args, kwargs = _on_one_device(map_leaves(decoded, [args, kwargs]))
        with torch.no_grad():
            result = function(*args, **kwargs)
        tensors = [value for value in leaves_of(result) if isinstance(value, Tensor)]
        results.update((number, tensor) for number, tensor in zip(numbers, tensors, strict=False) if number is not None)


def _on_one_device(arguments: Any) -> Any:
    """Bring tensors to the device of the first: an average may lie on the host."""
    device = next(value.device for value in leaves_of(arguments) if isinstance(value, Tensor))

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return value

    return map_leaves(moved, arguments)
