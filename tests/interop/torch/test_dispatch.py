"""Operations that are watched, and those that are not."""

import torch

from equipoise.interop.torch.dispatch import OperationWatch, unwatched

META = torch.device("meta")


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
    watch.start()
    try:
        with unwatched():
            data = value.data
            other = data.to("cpu", torch.float64)
    finally:
        watch.stop()
    assert data.device == other.device == torch.device("cpu")
    assert data.data_ptr() == value.data_ptr()
    assert names == []
