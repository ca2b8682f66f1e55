"""Operations on parameters of other processes: noted in the main process, and computed where the values lie.

A callback that averages the weights computes with each of them by itself: it copies, adds, interpolates. So such an
operation needs no value here, and its result lies where its operands do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import finalize

import torch
from torch import Tensor

from equipoise.extensions.pipeline.messaging.commands import placeholder
from equipoise.extensions.pipeline.messaging.remote_parameters import Unknown, is_elsewhere, origin_of, view_of
from equipoise.tree import leaves_of, map_leaves

__all__ = ["RemoteOperations", "compute_operations"]

# Name of a function, its arguments, and the numbers of its results: one for each tensor, in order. Without a name, the
# results are needed no more.
Operation = tuple[str, Any, Any, list[int]]


class _Operand:
    """A tensor of an operation.

    Args:
        number: Key of a tensor of the module or of a copy of it, or number of an earlier result.
        is_result: Whether it is an earlier result.
    """

    def __init__(self, number: int, *, is_result: bool) -> None:
        self.number = number
        self.is_result = is_result


class RemoteOperations:
    """Operations that wait to be sent.

    Args:
        key_of: Returns the key of a parameter.
        stages_of: Returns the stages whose processes have the tensor with a key.

    Attributes:
        changed: Keys of the tensors that operations have changed.
    """

    def __init__(self, key_of: Callable[[Tensor], int | None], stages_of: Callable[[int], Sequence[int]]) -> None:
        self._key_of = key_of
        self._stages_of = stages_of
        # For the number of a result the stages in whose processes it is.
        self._results: list[tuple[int, ...]] = []
        self._pending: dict[int, list[Operation]] = {}
        self.changed: set[int] = set()

    @property
    def have_results(self) -> bool:
        """Whether there has been an operation."""
        return bool(self._results)

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
        name = function.__name__
        if name == "to" and _changes_nothing(args[0], (*args[1:], *kwargs.values())):
            return args[0]
        if name.startswith("_foreach_"):
            return self._for_each(function, args, kwargs)
        return self._note(function, args, kwargs)

    def _for_each(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Divide an operation on lists of tensors by the processes in which these are."""
        count = len(args[0])
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in range(count):
            tensors = [values[index] for values in args if isinstance(values, list | tuple)]
            groups.setdefault(self._place_of(tensors), []).append(index)
        results: list[Any] = [None] * count
        for place, indices in groups.items():
            of_group = [_chosen(values, indices) if isinstance(values, list | tuple) else values for values in args]
            compute = self._note if place else _call
            for index, result in zip(indices, compute(function, of_group, kwargs) or of_group[0], strict=True):
                results[index] = result
        return results

    def _place_of(self, values: Iterable[Any]) -> tuple[int, ...]:
        """Return the stages of all tensors among values; none if they are in this process."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        # A number, such as that of updates, is sent.
        places = {self._stages_with(tensor) for tensor in tensors if is_elsewhere(tensor) or tensor.ndim}
        if len(places) > 1:
            raise Unknown
        return places.pop() if places else ()

    def _stages_with(self, tensor: Tensor) -> tuple[int, ...]:
        if not is_elsewhere(tensor):
            return ()
        operand = self._operand(tensor)
        return self._results[operand.number] if operand.is_result else tuple(self._stages_of(operand.number))

    def _operand(self, tensor: Tensor) -> _Operand:
        origin = origin_of(tensor)
        if isinstance(origin, int):
            return _Operand(origin, is_result=True)
        key = None if origin is None else self._key_of(origin)
        if key is None:
            raise Unknown
        return _Operand(key, is_result=False)

    def _note(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        place = self._place_of(leaves_of((args, kwargs)))
        # 1. The shapes of the results.
        originals: dict[int, Tensor] = {}

        def shape_of(value: Any) -> Any:
            if not isinstance(value, Tensor) or not is_elsewhere(value):
                return value
            shape = torch.empty(value.shape, dtype=value.dtype, device="meta")
            originals[id(shape)] = value
            return shape

        shapes = map_leaves(shape_of, [list(args), dict(kwargs)])
        try:
            result = function(*shapes[0], **shapes[1])
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise Unknown from error

        # 2. The operation, and the results.
        numbers: list[int] = []

        def result_of(value: Any) -> Any:
            if not isinstance(value, Tensor):
                raise Unknown
            # What is changed in place has a number as well.
            self._results.append(place)
            numbers.append(len(self._results) - 1)
            if id(value) in originals:
                self._note_change(originals[id(value)])
                return originals[id(value)]
            device = next(iter(originals.values())).device
            view = view_of(placeholder(value.shape, value.dtype).to(device), numbers[-1])
            finalize(view, self._drop, place, numbers[-1])
            return view

        if result is None:
            for tensor in args[0]:
                self._note_change(tensor)
        results = None if result is None else map_leaves(result_of, result)
        encoded = map_leaves(self._encoded, [list(args), dict(kwargs)])
        for stage in place:
            self._pending.setdefault(stage, []).append((function.__name__, *encoded, numbers))
        return results

    def _drop(self, place: Iterable[int], number: int) -> None:
        """Let workers free a result that this process refers to no more."""
        for stage in place:
            self._pending.setdefault(stage, []).append(("", [], {}, [number]))

    def _note_change(self, tensor: Tensor) -> None:
        operand = self._operand(tensor)
        if not operand.is_result:
            self.changed.add(operand.number)

    def _encoded(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # It may change before it is sent.
        return self._operand(value) if is_elsewhere(value) else value.detach().clone()


def _changes_nothing(tensor: Tensor, arguments: Iterable[Any]) -> bool:
    """Return True for a conversion to the device and dtype that a tensor has."""
    return all(argument in (tensor.device, tensor.dtype, None) or isinstance(argument, bool) for argument in arguments)


def _chosen(values: Sequence[Any], indices: Iterable[int]) -> list[Any]:
    return [values[index] for index in indices]


def _call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return function(*args, **kwargs)


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
            return results[value.number] if value.is_result else tensor_of(value.number)
        if isinstance(value, torch.device) and value.type != "cpu":
            return device
        return value

    for name, args, kwargs, numbers in operations:
        if not name:
            results.pop(numbers[0], None)
            continue
        function: Any = getattr(Tensor, name, None) or getattr(torch, name)
        args, kwargs = map_leaves(decoded, [args, kwargs])
        with torch.no_grad():
            result = function(*_beside_the_first(args), **kwargs)
        tensors_of_result = [value for value in leaves_of(result) if isinstance(value, Tensor)]
        # A change of several tensors in place may return none.
        results.update(zip(numbers, tensors_of_result, strict=False))


def _beside_the_first(args: list[Any]) -> list[Any]:
    """Bring tensors to the device of the first: an average may lie on the host."""
    device = next(value.device for value in leaves_of(args) if isinstance(value, Tensor))
    moved: list[Any] = map_leaves(lambda value: value.to(device) if isinstance(value, Tensor) else value, args)
    return moved
