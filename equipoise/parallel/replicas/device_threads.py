"""One thread for each distinct device; work for a device runs there in order.

Work for the first device runs in the calling thread. Where all devices are the same one there are no threads at all, so
runs on `["cpu", "cpu"]` draw their random numbers in the same order every time.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

__all__ = ["DeviceThreads", "ThreadState", "on_device"]

T = TypeVar("T")


@contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Make a device the current one of this thread for a while, where its type has such a thing.

    Kernels without a guard of their own, and `torch.zeros(3, device="cuda")`, go to the current device.

    Args:
        device: The device.

    Example:
        >>> with on_device(torch.device("cpu")):
        ...     pass
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


class ThreadState(NamedTuple):
    """What torch keeps for each thread and a new thread lacks.

    Attributes:
        grad, inference: The modes for gradients.
        autocast: For each type of device whether it casts, and to which dtype.
        cache: Whether autocast keeps the weights it has cast.
        default_device: Where tensors are made.
        cuda_device: Number of the current CUDA device; None where this process does not use CUDA.
        cuda_streams: The current stream of each CUDA device; empty likewise.
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
        """The state of the calling thread.

        Args:
            device_types: "cpu", "cuda", ...: whose autocast matters.
        """
        state = cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in device_types),
            torch.is_autocast_cache_enabled(),
            torch.get_default_device(),
        )
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return state
        streams = tuple(torch.cuda.current_stream(index) for index in range(torch.cuda.device_count()))
        return state._replace(cuda_device=torch.cuda.current_device(), cuda_streams=streams)

    def without_devices(self) -> "ThreadState":
        """Return the same state for a thread of another process, which has devices and streams of its own."""
        return self._replace(cuda_device=None, cuda_streams=())

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The same state in another thread."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.cache))
            if self.default_device != torch.get_default_device():
                stack.enter_context(self.default_device)
            self._enter_cuda(stack)
            yield

    def _enter_cuda(self, stack: ExitStack) -> None:
        """Enter the streams that differ from this thread's, and then the device, which entering a stream changes."""
        for stream in self.cuda_streams:
            if torch.cuda.current_stream(stream.device) != stream:
                stack.enter_context(torch.cuda.stream(stream))
        if self.cuda_device is not None and torch.cuda.current_device() != self.cuda_device:
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
        kinds = {device.type for device in devices} | {"cpu"}
        self._kinds = tuple(kind for kind in kinds if torch.amp.is_autocast_available(kind))
        others = len(set(devices)) - 1
        self._pool = ThreadPoolExecutor(others, thread_name_prefix="equipoise-device") if others else None

    def run(self, functions: Sequence[tuple[int, Callable[[], T]]]) -> list[T]:
        """Runs functions and returns their answers in order.

        Args:
            functions: Each with the index of its device.

        Raises:
            BaseException: What the first of them raised that failed, with a note on which device; the others have
                ended by then.
        """
        answers: list[Any] = [None] * len(functions)
        by_device: dict[torch.device, list[int]] = {}
        failed: dict[torch.device, int] = {}
        self.failed = None
        for position, (index, _) in enumerate(functions):
            by_device.setdefault(self.devices[index], []).append(position)

        def work(device: torch.device, positions: list[int]) -> None:
            for position in positions:
                try:
                    with on_device(device):
                        answers[position] = functions[position][1]()
                except BaseException as error:
                    failed[device] = functions[position][0]
                    error.add_note(f"This was part {position + 1} of {len(functions)} of the batch, on {device}.")
                    raise

        (first, own), *others = by_device.items()
        state = ThreadState.capture(self._kinds) if others else None
        futures = [self._submit(state, work, device, positions) for device, positions in others]
        errors: list[BaseException] = []
        try:
            work(first, own)
        except BaseException as error:
            errors.append(error)
        errors += [failure for failure in [future.exception() for future in futures] if failure is not None]
        try:
            if errors:
                self.failed = next(failed[device] for device in by_device if device in failed)
                raise errors[0]
        finally:
            del errors, futures  # else the error, in whose traceback this frame is, would keep itself alive
        return answers

    def _submit(
        self,
        state: ThreadState | None,
        work: Callable[[torch.device, list[int]], None],
        device: torch.device,
        positions: list[int],
    ) -> Future[None]:
        assert self._pool is not None
        assert state is not None
        entered = state.entered

        def in_thread() -> None:
            with entered():
                work(device, positions)

        return self._pool.submit(in_thread)

    def close(self) -> None:
        """Ends the threads."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
