"""Operations that are watched, and those that are not."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from equipoise.interop.torch.dispatch import OperationWatch, namespace_of, unwatched

META = torch.device("meta")


class Functions(TorchFunctionMode):
    """Notes that functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_watch_with_a_device_moves_arguments() -> None:
    value, names = torch.ones(2), []
    watch = OperationWatch(lambda name, result, args: names.append(name), META)
    watch.start()
    try:
        assert (value * 2).device == META
        assert value.data.device == META
    finally:
        watch.stop()
    assert names == ["mul", "detach"]


def test_what_is_unwatched_stays_where_it_is() -> None:
    value, names = torch.ones(2), []
    watch = OperationWatch(lambda name, result, args: names.append(name), META)
    with Functions() as functions:
        watch.start()
        try:
            with unwatched():
                data = value.data
                other = data.to("cpu", torch.float64)
        finally:
            watch.stop()
        count = functions.count
    assert data.device == other.device == torch.device("cpu")
    assert data.data_ptr() == value.data_ptr()
    assert names == []
    assert count == 0


def test_namespaces_of_operations() -> None:
    with torch.library._scoped_library("dispatch_tests", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        assert namespace_of(torch.ops.dispatch_tests.double) == "dispatch_tests"
        assert namespace_of(torch.ops.dispatch_tests.double.default) == "dispatch_tests"
    assert namespace_of(torch.ops.aten.add.Tensor) == "aten"
    assert namespace_of(torch.ops.higher_order.cond) == "higher_order"
    assert namespace_of(torch.nn.functional.relu) is None
    assert namespace_of(len) is None
