"""One thread for each distinct device, which runs the work for that device in order.

The calling thread runs the work for the first device. If all devices are the same one there are no other threads, so
runs on `["cpu", "cpu"]` draw their random numbers in the same order every time.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

from equipoise.parallel.device_work import computing_on, on_device
from equipoise.precision import AutocastRegions

__all__ = ["DeviceThreads", "ThreadState"]

T = TypeVar("T")


@cache
def _regions(device_type: str, dtype: torch.dtype, enabled: bool, keeps_casts: bool) -> AutocastRegions:
    return AutocastRegions(device_type, dtype, enabled=enabled, keeps_casts=keeps_casts)


class ThreadState(NamedTuple):
    """State that torch keeps for each thread. A new thread starts with the defaults.

    Attributes:
        grad: True if gradients are enabled.
        inference: True in inference mode.
        autocast: For each type of device: the type, whether autocast is enabled, and its dtype.
        cache: True if autocast keeps the weights that it has cast.
        default_device: The device of new tensors.
        cuda_device: Number of the current CUDA device. None: this process does not use CUDA. Default: None.
        cuda_streams: The current stream of each CUDA device. Empty if this process does not use CUDA.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    cache: bool
    default_device: torch.device
    cuda_device: int | None = None
    cuda_streams: tuple[torch.cuda.Stream, ...] = ()

    @classmethod
    def capture(cls, device_types: Sequence[str]) -> "ThreadState":
        """Return the state of the calling thread.

        Args:
            device_types: Types of devices whose autocast matters: "cpu", "cuda", ...
        """
        autocast = []
        for device_type in device_types:
            enabled = torch.is_autocast_enabled(device_type)
            autocast.append((device_type, enabled, torch.get_autocast_dtype(device_type)))
        state = cls(
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=tuple(autocast),
            cache=torch.is_autocast_cache_enabled(),
            default_device=torch.get_default_device(),
        )
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return state
        return state._replace(
            cuda_device=torch.cuda.current_device(),
            cuda_streams=tuple(torch.cuda.current_stream(index) for index in range(torch.cuda.device_count())),
        )

    def without_devices(self) -> "ThreadState":
        """Return the same state for a thread of another process, which has devices and streams of its own."""
        return self._replace(cuda_device=None, cuda_streams=())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply this state to the calling thread in a `with` block. Only what differs there is entered."""
        with ExitStack() as stack:
            if torch.is_inference_mode_enabled() != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            has_other_cache = torch.is_autocast_cache_enabled() != self.cache
            for device_type, enabled, dtype in self.autocast:
                is_enabled = torch.is_autocast_enabled(device_type)
                has_other_dtype = torch.get_autocast_dtype(device_type) != dtype
                if is_enabled != enabled or has_other_dtype or (enabled and has_other_cache):
                    regions = _regions(device_type, dtype, enabled, self.cache)
                    stack.enter_context(regions())
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            self._enter_cuda(stack)
            yield

    def _enter_cuda(self, stack: ExitStack) -> None:
        """Enter the streams that differ from this thread's, and then the device, which entering a stream changes."""
        for stream in self.cuda_streams:
            present_stream = torch.cuda.current_stream(stream.device)
            if present_stream != stream:
                stack.enter_context(torch.cuda.stream(stream))
        if self.cuda_device is None:
            return
        if torch.cuda.current_device() != self.cuda_device:
            stack.enter_context(torch.cuda.device(self.cuda_device))


class DeviceThreads:
    """Runs functions on devices.

    Args:
        devices: All devices, repeats allowed.

    Attributes:
        failed: The index of the device whose error the last `run` raised; None if it raised none.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.failed: int | None = None
        device_types = {"cpu"}
        for device in devices:
            device_types.add(device.type)
        self._autocast_types = tuple(filter(torch.amp.is_autocast_available, device_types))
        self._pool: ThreadPoolExecutor | None = None
        # The calling thread runs the work of the first device.
        workers = len(set(devices)) - 1
        if workers:
            self._pool = ThreadPoolExecutor(workers, thread_name_prefix="equipoise-device")

    def run(self, functions: Sequence[tuple[int, Callable[[], T]]]) -> list[T]:
        """Run functions and return their results in order.

        Args:
            functions: Functions, each with the index of its device.

        Raises:
            BaseException: The error of the first device on which a function failed, with a note about the part and the
                device. All functions have ended by then.
        """
        results: list[Any] = [None] * len(functions)
        failed: dict[torch.device, int] = {}
        self.failed = None

        # 1. The positions of each device's functions.
        by_device: dict[torch.device, list[int]] = {}
        for position, (index, _) in enumerate(functions):
            device = self.devices[index]
            by_device.setdefault(device, []).append(position)

        def work(device: torch.device, positions: list[int]) -> None:
            for position in positions:
                index, function = functions[position]
                try:
                    with on_device(device), computing_on(index):
                        results[position] = function()
                except BaseException as error:
                    failed[device] = index
                    number = position + 1
                    error.add_note(f"This was part {number} of {len(functions)} of the batch, on {device}.")
                    raise

        # 2. Other threads begin, in the state of this one.
        (first, first_positions), *rest = by_device.items()
        futures: list[Future[None]] = []
        if rest:
            state = ThreadState.capture(self._autocast_types)
            futures = [self._submit(state, work, device, positions) for device, positions in rest]

        # 3. This thread works, and waits for the others.
        errors: list[BaseException] = []
        try:
            work(first, first_positions)
        except BaseException as error:
            errors.append(error)
        errors += _errors_of(futures)

        # 4. The first error is raised. This frame is in its traceback, so a variable here would keep it alive.
        try:
            if errors:
                self.failed = next(failed[device] for device in by_device if device in failed)
                raise errors[0]
        finally:
            del errors, futures
        return results

    def _submit(
        self,
        state: ThreadState,
        work: Callable[[torch.device, list[int]], None],
        device: torch.device,
        positions: list[int],
    ) -> Future[None]:
        assert self._pool is not None
        entered = state.entered

        def in_thread() -> None:
            with entered():
                work(device, positions)

        return self._pool.submit(in_thread)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def _errors_of(futures: Sequence[Future[None]]) -> list[BaseException]:
    """Wait for all futures and return their errors."""
    errors = (future.exception() for future in futures)
    return [error for error in errors if error is not None]
