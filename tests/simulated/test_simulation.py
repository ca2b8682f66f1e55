"""Simulated devices do what those of CUDA do, where programs that run on a CPU alone go wrong."""

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.pipeline.forward.layer_lending import computed_on
from tests.simulated.devices.installation import extension

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
MIB = 1 << 20


# Devices


@pytest.mark.parametrize("other", ["cuda:1", "cpu"])
def test_tensors_of_two_devices_in_one_operation_are_refused(other: str) -> None:
    one, two = torch.ones(3, device=FIRST), torch.ones(3, device=other)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found at least two"):
        one + two
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found at least two"):
        torch._foreach_add_([one, one], [one, two])
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found at least two"):
        torch.cat([one, two])


# Memory


@pytest.fixture
def limited() -> Iterator[None]:
    torch.cuda.empty_cache()
    extension().set_limit(1, extension().allocated_bytes(1) + MIB)
    yield
    extension().set_limit(1, 0)


@pytest.mark.usefixtures("limited")
def test_a_device_whose_memory_is_full_raises_an_error_that_names_it() -> None:
    elsewhere = torch.empty(MIB, device=FIRST)
    kept = torch.empty(MIB // 2, dtype=torch.uint8, device=SECOND)
    before = torch.cuda.memory_allocated(SECOND)
    for allocate in (lambda: torch.empty(MIB, device=SECOND), lambda: elsewhere.to(SECOND), lambda: kept.float()):
        with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory.* GPU 1 has a total capacity"):
            allocate()
    assert torch.cuda.memory_allocated(SECOND) == before


def test_peaks_are_counted() -> None:
    gc.collect()  # what other tests have left in circles
    torch.cuda.reset_peak_memory_stats(SECOND)
    before = torch.cuda.memory_allocated(SECOND)
    torch.ones(MIB, dtype=torch.uint8, device=SECOND).add_(1)
    assert torch.cuda.memory_allocated(SECOND) == before
    assert torch.cuda.max_memory_allocated(SECOND) == before + MIB
    unused, total = torch.cuda.mem_get_info(SECOND)
    assert total - unused == before


def test_fresh_memory_is_poisoned() -> None:
    assert torch.empty(1000, device=FIRST).isnan().all()
    assert (torch.empty(1000, dtype=torch.int64, device=FIRST) == -1).all()
    assert torch.empty(8, pin_memory=True).isnan().all()


# Waiting


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_copy_to_the_host_is_late(dtype: torch.dtype) -> None:
    expected = torch.tensor([0, 1, 1, 0]).to(dtype)
    values = expected.to(SECOND)
    copy = values.to("cpu", non_blocking=True)
    event = torch.cuda.current_stream(SECOND).record_event()
    values.zero_()  # the device works in order: the copy has the values of its time
    assert copy.is_pinned()
    assert not event.query()
    assert not torch.equal(copy, expected)
    torch.cuda.synchronize(FIRST)  # another device
    assert not event.query()
    assert not torch.equal(copy, expected)
    event.synchronize()
    assert event.query()
    assert torch.equal(copy, expected)


def test_a_wait_for_another_stream_is_none() -> None:
    stream = torch.cuda.Stream(SECOND)
    value = torch.ones(2, device=SECOND)
    stream.wait_stream(torch.cuda.current_stream(SECOND))
    with torch.cuda.stream(stream):
        assert torch.cuda.current_device() == 1
        copy = value.to("cpu", non_blocking=True)
    assert torch.cuda.current_device() == 0
    torch.cuda.current_stream(SECOND).synchronize()
    assert copy.isnan().all()
    stream.synchronize()
    assert copy.tolist() == [1, 1]


def test_waits_are_counted() -> None:
    value = torch.ones(2, device=FIRST)
    extension().take_reasons()
    before = extension().waits()
    (value * 2).sum()
    value.to(SECOND)
    torch.ones(2).pin_memory().to(FIRST, non_blocking=True)
    assert extension().waits() == before
    value.sum().item()
    value.cpu()
    torch.ones(2).to(FIRST)
    value.nonzero()
    torch.cuda.synchronize()
    assert extension().waits() == before + 5
    assert extension().take_reasons() == [
        "aten::_local_scalar_dense",
        "copy to the CPU",
        "copy from the CPU",
        "aten::nonzero",
        "torch.cuda.synchronize",
    ]


def test_launches_are_counted() -> None:
    value = torch.ones(2, 3, device=SECOND)
    before = [extension().launches(index) for index in range(2)]
    (value.t().view(3, 2)[0] * 2).sum()  # views are free
    assert [extension().launches(index) for index in range(2)] == [before[0], before[1] + 2]


def test_a_list_of_tensors_is_one_launch_where_all_are_alike() -> None:
    tensors = [torch.ones(size, device=SECOND) for size in range(1, 6)]
    before = extension().launches(1)
    torch._foreach_mul_(tensors, 2.0)
    assert extension().launches(1) == before + 1
    torch._foreach_mul_(tensors, torch.tensor(0.5, dtype=torch.float64, device=SECOND))
    # With that of the factor; kernels take no factor of another dtype.
    assert extension().launches(1) == before + 2 + len(tensors)
    assert {value for tensor in tensors for value in tensor.tolist()} == {1.0}


# Layers that are lent to another device


class Scaled(nn.Module):
    """A layer beside a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(2))

    def forward(self, values: Tensor) -> Tensor:
        return self.layer(values) * self.scale


def test_a_lent_layer_gets_its_own_values_back() -> None:
    """A recording moves the arguments of operations to its device; the values of a lent layer stay where they are."""
    network = nn.Sequential(Scaled()).to(FIRST)
    before = [(tensor.device, tensor.data_ptr()) for tensor in network.parameters()]
    with computed_on(SECOND, network, network):
        assert network(torch.ones(1, 2, device=SECOND)).device == SECOND
    assert [(tensor.device, tensor.data_ptr()) for tensor in network.parameters()] == before


def test_a_call_of_lent_layers_changes_their_running_statistics() -> None:
    network, alone = nn.Sequential(nn.BatchNorm1d(2)), nn.BatchNorm1d(2)
    batch = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    network.to(FIRST)
    with computed_on(SECOND, network, network), torch.no_grad():
        network(batch.to(SECOND))
    alone(batch)
    assert torch.equal(network[0].running_mean.cpu(), alone.running_mean)
    assert network[0].num_batches_tracked == 1
