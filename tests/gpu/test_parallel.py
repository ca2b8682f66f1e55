"""Lists of tensors, random numbers, threads and measured shares on a GPU, as on the CPU."""

import io

import pytest
import torch

from equipoise.interop.torch import foreach
from equipoise.parallel.batches.calibration import Calibration
from equipoise.parallel.replicas.device_threads import DeviceThreads
from equipoise.parallel.snapshot.random_state import RandomState, capture, isolated
from tests.gpu.runs import CPU, GPU

# Lists of tensors


@pytest.mark.parametrize("place", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_tensors_of_two_devices_are_multiplied(dtype: torch.dtype, place: str) -> None:
    tensors = [torch.randn(4, 5, device="cuda").to(dtype), torch.randn(3).to(dtype)]
    for factor in (4 / 3, torch.tensor(4 / 3, dtype=torch.float64, device=place)):
        expected = [tensor * (4 / 3) for tensor in tensors]
        foreach.multiply_(tensors, factor)
        for tensor, other in zip(tensors, expected, strict=True):
            torch.testing.assert_close(tensor, other)


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


# Threads


def test_threads_take_a_stream_along() -> None:
    # The last device is not the current one where there are several.
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    threads = DeviceThreads([CPU, last, torch.device("meta")])

    def current() -> tuple[int, torch.cuda.Stream]:
        return torch.cuda.current_device(), torch.cuda.current_stream(last)

    stream = torch.cuda.Stream(last)
    try:
        with torch.cuda.stream(stream):
            # What there is one of runs in the thread of the caller.
            seen = threads.run([(0, lambda: None), (2, current)])[1]
    finally:
        threads.close()
    assert seen == (last.index, stream)


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
