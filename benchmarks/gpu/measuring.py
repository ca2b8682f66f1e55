"""Setting of the campaign, facts about the device and its ceilings, and the time, launches and waits of steps."""

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from benchmarks.gpu.campaign import Row

__all__ = ["Measured", "Setting", "TimedBatches", "Window", "device_facts", "seconds_of", "tests"]

Batch = tuple[Tensor, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Setting:
    """Place where the campaign runs.

    Attributes:
        device: The first CUDA device, or the CPU.
        is_small: Whether sizes are small, so that times mean nothing.
        is_simulated: Whether the CUDA device is simulated.
    """

    device: torch.device
    is_small: bool
    is_simulated: bool

    @classmethod
    def find(cls, *, is_small: bool, is_simulated: bool) -> "Setting":
        """Find the device. Without a real GPU all sizes are small."""
        has_cuda = torch.cuda.is_available()
        device = torch.device("cuda", 0) if has_cuda else torch.device("cpu")
        if is_simulated or not has_cuda:
            is_small = True
            torch.set_num_threads(1)
        return cls(device, is_small, is_simulated)

    @property
    def has_cuda(self) -> bool:
        """Return True if there is a CUDA device, real or simulated."""
        return self.device.type == "cuda"

    def pick(self, full: T, small: T) -> T:
        """Return the size that belongs here."""
        return small if self.is_small else full

    def wait(self) -> None:
        """Wait for the device."""
        if self.has_cuda:
            torch.cuda.synchronize(self.device)


def seconds_of(function: Callable[[], object], setting: Setting, repeats: int) -> float:
    """Return the seconds of a call, after one that warms up."""
    function()
    setting.wait()
    begun = time.perf_counter()
    for _ in range(repeats):
        function()
    setting.wait()
    return (time.perf_counter() - begun) / repeats


# The device


def device_facts(setting: Setting) -> Iterator[Row]:
    """Tell what the device is, and what it can do at most."""
    yield Row("Python", platform.python_version())
    yield Row("torch", torch.__version__)
    if setting.has_cuda:
        properties = torch.cuda.get_device_properties(setting.device)
        yield Row("device", properties.name)
        yield Row("memory", properties.total_memory / 2**30, "GiB")
        yield Row("compute capability", ".".join(map(str, torch.cuda.get_device_capability(setting.device))))
        yield Row("CUDA", str(torch.version.cuda))
        yield Row("driver", driver_version())
    else:
        yield Row("device", f"CPU, {platform.machine()}")
    yield from ceilings(setting)


def driver_version() -> str:
    """Return the version of the driver, as nvidia-smi tells it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "unknown"
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    lines = result.stdout.split()
    return lines[0] if lines else "unknown"


def ceilings(setting: Setting) -> Iterator[Row]:
    """Measure the fastest copy and the fastest matrix product."""
    # 1. A copy reads and writes each byte.
    size = setting.pick(2**30, 2**20)
    source = torch.ones(size, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), setting, setting.pick(20, 2))
    yield Row.time("copy within the device", 2 * size / seconds / 1e9, "GB/s")
    # 2. From pinned memory.
    if setting.has_cuda:
        pinned = torch.empty(size // 4, dtype=torch.uint8, pin_memory=True)
        seconds = seconds_of(lambda: target[: size // 4].copy_(pinned, non_blocking=True), setting, setting.pick(20, 2))
        yield Row.time("copy from pinned memory", size / 4 / seconds / 1e9, "GB/s")
    # 3. A product of n³ multiplications and additions.
    n = setting.pick(8192, 64)
    matrix = torch.randn(n, n, device=setting.device).bfloat16()
    seconds = seconds_of(lambda: matrix @ matrix, setting, setting.pick(20, 2))
    yield Row.time("bfloat16 matrix product", 2 * n**3 / seconds / 1e12, "TFLOP/s")


# Tests


def tests(setting: Setting) -> Iterator[Row]:
    """Run the tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", "tests/gpu"]
    if setting.is_simulated:
        command += ["-p", "tests.simulated.as_gpus"]
    if setting.is_small:
        command += ["-m", "not slow"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines() or ["nothing was written"]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            yield Row.holds(line[:150], False)
    yield Row.holds(lines[-1].strip("= "), result.returncode == 0)


# Steps


class Measured(NamedTuple):
    """Time, launches and waits of one step.

    Attributes:
        processor: Microseconds of processor time.
        time: Microseconds.
        launches: Kernels that were launched; NaN if they were not counted.
        waits: Times that the host waited for a stream; NaN if they were not counted.
    """

    processor: float
    time: float
    launches: float
    waits: float


class Window:
    """Some steps in the midst of a run, between the fetches of two batches.

    Args:
        setting: Where.
        steps: Number of steps.
        before: Number of steps before them.
        counts: Whether launches and waits are counted, which makes steps slower. Default: False.
    """

    def __init__(self, setting: Setting, steps: int, before: int, *, counts: bool = False) -> None:
        self.setting = setting
        self.steps = steps
        self.first = before
        self.counts = counts
        self.measured: Measured | None = None
        self._profile: profile | None = None
        self._launches = self._waits = 0

    @property
    def batches(self) -> int:
        """The number of batches of a run."""
        return self.first + self.steps + 1

    def on_fetch(self, index: int) -> None:
        """Begin or end, if it is time to."""
        if index == self.first:
            self._begin()
        elif index == self.first + self.steps:
            self._end()

    def _begin(self) -> None:
        self.setting.wait()
        if self.counts:
            self._start_counts()
        self._processor = time.process_time()
        self._time = time.perf_counter()

    def _end(self) -> None:
        processor = time.process_time() - self._processor
        self.setting.wait()
        seconds = time.perf_counter() - self._time
        launches, waits = self._read_counts() if self.counts else (float("nan"), float("nan"))
        per_step = [1e6 * processor, 1e6 * seconds, launches, waits]
        self.measured = Measured(*(value / self.steps for value in per_step))

    def _start_counts(self) -> None:
        if self.setting.is_simulated:
            extension = simulation()
            self._launches = extension.launches(0)
            self._waits = extension.waits()
        else:
            self._profile = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
            self._profile.start()

    def _read_counts(self) -> tuple[float, float]:
        if self._profile is None:
            extension = simulation()
            # One wait is that of this window.
            return extension.launches(0) - self._launches, extension.waits() - self._waits - 1
        self._profile.stop()
        names = [event.name for event in self._profile.events() or ()]
        launches = sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names)
        return launches, names.count("cudaStreamSynchronize")


def simulation() -> Any:
    """Return the extension that simulates devices."""
    from tests.simulated.devices.installation import extension

    return extension()


class TimedBatches(Dataset[Batch]):
    """The same few batches again and again; the fetches of two of them begin and end a window.

    Args:
        batches: What is fetched.
        window: Receives each fetch.
    """

    def __init__(self, batches: Sequence[Batch], window: Window) -> None:
        self.batches = batches
        self.window = window

    def __len__(self) -> int:
        return self.window.batches

    def __getitem__(self, index: int) -> Batch:
        self.window.on_fetch(index)
        return self.batches[index % len(self.batches)]

    def loader(self) -> DataLoader[Batch]:
        """A loader over them, in this process."""
        return DataLoader(self, batch_size=None)
