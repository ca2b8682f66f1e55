"""Graphs of the simulated devices do what CUDA's do."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def test_nothing_is_computed_before_a_replay() -> None:
    values = torch.ones(3, device=DEVICE)
    graph, doubled = captured(lambda: values.mul_(2) + 1)
    assert values.tolist() == [1, 1, 1]
    assert doubled.isnan().all()
    graph.replay()
    assert (values.tolist(), doubled.tolist()) == ([2, 2, 2], [3, 3, 3])
    graph.replay()
    assert (values.tolist(), doubled.tolist()) == ([4, 4, 4], [5, 5, 5])


def test_a_replay_reads_what_is_in_memory_now() -> None:
    values = torch.ones(3, device=DEVICE)
    view = values[1:]
    graph, total = captured(lambda: torch.stack([view.sum(), values.sum()]))
    values.copy_(torch.tensor([1.0, 2.0, 3.0]))
    graph.replay()
    assert total.tolist() == [5, 6]


def test_a_replay_is_one_launch() -> None:
    values = torch.ones(3, device=DEVICE)
    graph, _ = captured(lambda: (values * 2 + 1).sum())
    before = extension().launches(1)
    graph.replay()
    assert extension().launches(1) - before == 1


def test_a_training_step() -> None:
    """Forward, backward, dropout, statistics, and an optimiser on lists of parameters."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)).to(DEVICE)
        return module, torch.optim.Adam(module.parameters(), 0.1, capturable=True)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(features).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    features = torch.randn(6, 4).to(DEVICE)
    states = []
    for is_captured in (False, True):
        module, optimizer = make()
        torch.cuda.manual_seed(5)
        losses = [step(module, optimizer)]
        if is_captured:
            graph, loss = captured(lambda: step(module, optimizer))  # noqa: B023
        for _ in range(3):
            if is_captured:
                graph.replay()
                losses.append(loss.clone())
            else:
                losses.append(step(module, optimizer))
        states.append([*losses, *module.state_dict().values(), torch.cuda.get_rng_state()])
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda values: values.sum().item(),
        lambda values: values.cpu(),
        lambda values: torch.ones(3).to(DEVICE),
        lambda values: values.nonzero(),
        lambda values: values.to("cuda:0"),
        lambda values: values.resize_(1000),
        lambda values: torch.cuda.synchronize(),
        lambda values: torch.cuda.current_stream().synchronize(),
        lambda values: torch.cuda.get_rng_state(),
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


def test_other_streams_compute_during_a_capture() -> None:
    current = torch.cuda.current_stream()
    values = torch.ones(3, device=DEVICE)

    def both() -> Tensor:
        with torch.cuda.stream(current):
            values.add_(1)
        return torch.zeros(2, device=DEVICE) + 1

    graph, result = captured(both)
    assert values.tolist() == [2, 2, 2]
    graph.replay()
    assert (values.tolist(), result.tolist()) == ([2, 2, 2], [1, 1])


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


def test_waits_can_be_warnings() -> None:
    values = torch.ones(3, device=DEVICE)
    torch.cuda.set_sync_debug_mode("warn")
    assert torch.cuda.get_sync_debug_mode() == 1
    try:
        with pytest.warns(UserWarning, match="called a synchronizing CUDA operation: aten::_local_scalar_dense"):
            values.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    values.sum().item()
