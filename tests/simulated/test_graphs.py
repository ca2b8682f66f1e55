"""Graphs of the simulated devices do what CUDA's do."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.simulated.devices.installation import extension

DEVICE = torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def on_the_second_device() -> Iterator[None]:
    with torch.cuda.device(DEVICE):
        yield


def captured(function: Callable[[], Any], **options: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a function; return the graph, and what the function returned."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(), **options):
        result = function()
    torch.cuda.synchronize()
    return graph, result


def test_a_graph_computes_with_what_is_in_memory_when_it_is_replayed() -> None:
    values = torch.ones(3, device=DEVICE)
    graph, doubled = captured(lambda: values.mul_(2) + 1)
    assert values.tolist() == [1, 1, 1]
    assert doubled.isnan().all()
    before = extension().launches(1)
    graph.replay()
    assert extension().launches(1) - before == 1
    assert (values.tolist(), doubled.tolist()) == ([2, 2, 2], [3, 3, 3])
    values[0] = 5
    graph.replay()
    assert (values.tolist(), doubled.tolist()) == ([10, 4, 4], [11, 5, 5])


@pytest.mark.parametrize(
    "function",
    [
        lambda values: values.sum().item(),
        lambda values: torch.ones(3).to(DEVICE),
        lambda values: values.nonzero(),
        lambda values: values.resize_(1000),
        lambda values: torch.cuda.synchronize(),
        lambda values: torch.cuda.manual_seed(1),
        lambda values: torch.rand(2, device=DEVICE, generator=torch.Generator(DEVICE)),
    ],
)
def test_what_needs_the_host_is_an_error(function: Callable[[Tensor], Any]) -> None:
    values = torch.ones(3, device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    current = torch.cuda.current_stream()
    torch.cuda.set_stream(stream)
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        function(values)
    assert torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="operation failed due to a previous error during capture"):
        graph.capture_end()
    torch.cuda.set_stream(current)
    assert not torch.cuda.is_current_stream_capturing()
    assert values.tolist() == [1, 1, 1]
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        graph.replay()


def test_a_capture_needs_a_stream_of_its_own() -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_a_graph_does_not_keep_memory_of_others() -> None:
    values = [torch.ones(3, device=DEVICE)]
    graph, _ = captured(lambda: values[0] + 1)
    values.clear()
    with pytest.raises(RuntimeError, match="a graph uses memory of 12 bytes that was freed"):
        graph.replay()


def test_the_memory_of_a_graph_is_released_with_it() -> None:
    values = torch.ones(1000, device=DEVICE)
    before = extension().allocated_bytes(1)
    graph, result = captured(lambda: (values + 1).exp())
    assert extension().allocated_bytes(1) - before == 8000
    del result
    assert extension().allocated_bytes(1) - before == 8000
    graph.reset()
    assert extension().allocated_bytes(1) == before


def test_replays_are_ordered_among_streams() -> None:
    values = torch.ones(3, device=DEVICE)
    graph, result = captured(lambda: values + 1)
    side = torch.cuda.Stream()
    graph.replay()
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="Streams in disorder"):
        graph.replay()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        graph.replay()
    with pytest.raises(RuntimeError, match="Streams in disorder"):
        result.sum()
    torch.cuda.synchronize()
    assert result.tolist() == [2, 2, 2]


def test_a_pool_ends_with_its_last_graph() -> None:
    pool = torch.cuda.graph_pool_handle()
    values = torch.ones(3, device=DEVICE)
    first, _ = captured(lambda: values + 1, pool=pool)
    second, _ = captured(lambda: values + 1, pool=pool)
    first.reset()
    third, _ = captured(lambda: values + 1, pool=pool)
    second.reset()
    third.reset()
    with pytest.raises(RuntimeError, match="all graphs of this pool are released"):
        captured(lambda: values + 1, pool=pool)
