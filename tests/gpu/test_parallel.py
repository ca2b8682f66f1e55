"""Copies, streams, random numbers and lists of tensors on a GPU, as on the CPU."""

import copy
import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from equipoise.interop.torch import foreach
from equipoise.parallel.batches.calibration import Calibration
from equipoise.parallel.batches.gathering import gather
from equipoise.parallel.replicas.device_threads import DeviceThreads
from equipoise.parallel.replicas.replicas import Replicas
from equipoise.parallel.snapshot.random_state import RandomState, capture, isolated
from equipoise.to_device import ArrivingValue
from tests.gpu.runs import CPU, GPU

META = torch.device("meta")


# Lists of tensors


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_tensors_of_two_devices_are_multiplied(dtype: torch.dtype, place: str) -> None:
    tensors = [torch.randn(4, 5, device="cuda").to(dtype), torch.randn(3).to(dtype)]
    for factor in (4 / 3, torch.tensor(4 / 3, dtype=torch.float64, device=place)):
        expected = [tensor * (4 / 3) for tensor in tensors]
        foreach.multiply_(tensors, factor)
        for tensor, other in zip(tensors, expected, strict=True):
            torch.testing.assert_close(tensor, other)


@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_tensors_of_two_devices_are_gathered(device: torch.device) -> None:
    parts = [torch.ones(2), torch.full((3,), 2.0, device="cuda")]
    gathered = gather(parts, [2, 3], device)
    assert gathered.device == device
    assert gathered.tolist() == [1, 1, 2, 2, 2]
    mean = gather([part.mean() for part in parts], [2, 3], device, weights=[2, torch.tensor(3, device="cuda")])
    assert mean.device == device
    assert mean.item() == pytest.approx(1.6)


def test_a_value_arrives_from_a_device() -> None:
    tensor = torch.full((), 0.25, device="cuda")
    value = ArrivingValue(tensor)
    tensor.fill_(7.0)
    assert value.read(wait=True) == 0.25
    assert value.read() == 0.25


# Random numbers


def test_random_numbers_of_all_devices_come_again() -> None:
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    torch.cuda.manual_seed_all(3)
    state = through_a_file(capture())
    first = [torch.rand(5, device=device).tolist() for device in devices]
    with isolated():
        assert [torch.rand(5, device=device).tolist() for device in devices] != first
    state.restore()
    assert [torch.rand(5, device=device).tolist() for device in devices] == first


def through_a_file(state: RandomState) -> RandomState:
    file = io.BytesIO()
    torch.save({"random": state.state_dict()}, file)
    file.seek(0)
    return RandomState.from_state_dict(torch.load(file, weights_only=True)["random"])


# Replicas


def test_copies_give_the_gradients_of_the_module() -> None:
    devices = [GPU, *(torch.device("cuda", index) for index in range(torch.cuda.device_count()))]
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double().to(GPU)
    expected = copy.deepcopy(module)
    replicas = Replicas(module, devices)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (module, expected)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        replicas.refresh(range(len(devices)))
        for index, device in enumerate(devices):
            inputs = torch.randn(index + 2, 3, dtype=torch.float64, device=device)
            replicas[index](inputs).pow(2).sum().backward()
            expected(inputs.to(GPU)).pow(2).sum().backward()
        replicas.collect_gradients()
        for optimizer in optimizers:
            optimizer.step()
    for parameter, other in zip(module.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-12, atol=1e-12)


def test_recurrent_copies_are_flat() -> None:
    """CuDNN would warn."""
    module = nn.LSTM(3, 4).cuda()
    replicas = Replicas(module, [GPU] * 2)
    for _ in range(2):
        replicas.refresh([0, 1])
        replicas[1](torch.randn(2, 5, 3, device="cuda"))[0].sum().backward()
        with torch.no_grad():
            module.weight_hh_l0.add_(1)


# Threads


@pytest.fixture
def last() -> torch.device:
    """The last device, which is not the current one where there are several."""
    return torch.device("cuda", torch.cuda.device_count() - 1)


@pytest.fixture
def threads(last: torch.device) -> Iterator[DeviceThreads]:
    made = DeviceThreads([CPU, last, META])
    yield made
    made.close()


def test_threads_take_a_stream_along(threads: DeviceThreads, last: torch.device) -> None:
    def current() -> tuple[int, torch.cuda.Stream]:
        return torch.cuda.current_device(), torch.cuda.current_stream(last)

    stream = torch.cuda.Stream(last)
    with torch.cuda.stream(stream):
        # What there is one of runs in the thread of the caller.
        seen = threads.run([(0, lambda: None), (2, current)])[1]
    assert seen == (last.index, stream)


def test_devices_are_current_in_their_threads(threads: DeviceThreads, last: torch.device) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        ones = threads.run([(0, torch.cuda.current_device), (1, lambda: torch.ones(2, 2, device="cuda"))])[1]
        product = threads.run([(0, torch.cuda.current_device), (1, lambda: (ones @ ones).dtype)])[1]
    assert ones.device == last
    assert product is torch.bfloat16


# Measured shares


def test_memory_of_devices_is_measured() -> None:
    measuring = Calibration([GPU, CPU], {})
    for _ in range(3):
        kept = measuring.measured(0, lambda: torch.empty(8, 2**20, device=GPU).sum(), 8)()
        measuring.measured(1, lambda: None, 8)()
        measuring.end_step(16)
    most = measuring.times[0].most
    assert kept.device == GPU
    assert most is not None
    assert most * 2**22 <= torch.cuda.get_device_properties(GPU).total_memory
    assert measuring.times[1].most is None
