"""Work on devices runs in one thread for each, as the caller would run it, and ends before any error is raised.

The meta device is the second one here: threads are real, and nothing needs an accelerator.
"""

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from equipoise.parallel.replicas.device_threads import DeviceThreads, ThreadState

CPU, META = torch.device("cpu"), torch.device("meta")
PATIENCE = 120.0  # seconds until a test that waits for what never comes fails


@pytest.fixture
def threads() -> Iterator[DeviceThreads]:
    made = DeviceThreads([CPU, META, CPU, META])
    yield made
    made.close()


def name() -> str:
    return threading.current_thread().name


# Where and in which order


def test_one_thread_for_each_distinct_device(threads: DeviceThreads) -> None:
    ran: list[int] = []

    def record(position: int) -> str:
        ran.append(position)
        return name()

    names = threads.run([(index, partial(record, position)) for position, index in enumerate((0, 1, 2, 3, 0, 1))])
    assert set(names[::2]) == {name()}
    (other,) = set(names[1::2])
    assert other.startswith("equipoise-device")
    for parity in (0, 1):  # repeats one after the other
        assert [position for position in ran if position % 2 == parity] == list(range(parity, 6, 2))


def test_distinct_devices_run_at_the_same_time(threads: DeviceThreads) -> None:
    barrier = threading.Barrier(2, timeout=PATIENCE)
    assert sorted(threads.run([(0, barrier.wait), (1, barrier.wait)])) == [0, 1]


def test_the_first_of_those_that_take_part_runs_here(threads: DeviceThreads) -> None:
    assert threads.run([(1, name)]) == [name()]
    meta, cpu = threads.run([(1, name), (0, name)])
    assert meta == name()
    assert cpu.startswith("equipoise-device")


def test_one_device_needs_no_thread() -> None:
    before = threading.active_count()
    alone = DeviceThreads([CPU, CPU, CPU])
    assert alone.run([(index, name) for index in range(3)]) == [name()] * 3
    assert threading.active_count() == before
    alone.close()


# What the caller's thread is like


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": ExitStack,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "default device": lambda: torch.device("meta"),
    "bf16": lambda: torch.autocast("cpu", torch.bfloat16),
    "bf16 without cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "fp16": lambda: torch.autocast("cpu", torch.float16),
    "cast nothing": lambda: torch.autocast("cpu", enabled=False),
    "cuda dtype": lambda: torch.autocast("cuda", torch.bfloat16, enabled=False),
}


def look() -> dict[str, Any]:
    """Return torch's modes in this thread, and whether an operation follows them."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "dtype": torch.get_autocast_dtype("cpu"),
        "cache": torch.is_autocast_cache_enabled(),
        "default device": torch.get_default_device(),
        "made": torch.ones(2).device,
        "product": (torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")).dtype,
        "graph": torch.ones(2, requires_grad=True).mul(2).requires_grad,
        "inference tensor": torch.ones(2, device="cpu").is_inference(),
    }


# Each mode within the next one, which each can change what the other has set.
@pytest.mark.parametrize(("inner", "outer"), list(itertools.pairwise([*MODES, "nothing"])))
def test_threads_of_devices_have_the_modes_of_the_caller(inner: str, outer: str, threads: DeviceThreads) -> None:
    fresh = look()
    with MODES[outer](), MODES[inner]():
        here = look()
        first, other = threads.run([(0, look), (1, look)])
    assert first == here
    assert other == here
    assert threads.run([(0, look), (1, look)]) == [fresh, fresh]  # and are no longer


# Errors


def fail(error: BaseException, after: threading.Event | None = None) -> Callable[[], None]:
    def run() -> None:
        if after is not None:
            assert after.wait(PATIENCE)
        raise error

    return run


@pytest.mark.parametrize(("position", "kind"), [(0, ValueError), (1, KeyboardInterrupt)])
def test_an_error_names_its_part(position: int, kind: type[BaseException], threads: DeviceThreads) -> None:
    error = kind("too bad")
    functions = [(0, lambda: None), (1, lambda: None)]
    functions[position] = (position, fail(error))
    with pytest.raises(kind) as caught:
        threads.run(functions)
    assert caught.value is error
    assert error.__notes__ == [f"This was part {position + 1} of 2 of the batch, on {('cpu', 'meta')[position]}."]

    assert threads.run([(0, lambda: 1), (1, lambda: 2)]) == [1, 2]  # usable as before


@pytest.mark.parametrize("failing", [0, 1])
def test_other_devices_have_ended_when_an_error_is_raised(failing: int, threads: DeviceThreads) -> None:
    """One fails while the other computes, in whatever thread."""
    failed, ended = threading.Event(), []

    def fails() -> None:
        failed.set()
        raise ValueError("first")

    def goes_on() -> None:
        assert failed.wait(PATIENCE)
        for _ in range(1000):
            torch.ones(9).sum()
        ended.append(True)

    functions = [goes_on, goes_on]
    functions[failing] = fails
    with pytest.raises(ValueError, match="first"):
        threads.run(list(enumerate(functions)))
    assert ended == [True]


def test_of_two_errors_the_callers_comes_first(threads: DeviceThreads) -> None:
    raised = threading.Event()

    def other() -> None:
        raised.set()
        raise RuntimeError("there")

    with pytest.raises(ValueError, match="here"):
        threads.run([(0, fail(ValueError("here"), after=raised)), (1, other)])


def test_what_comes_after_an_error_on_a_device_is_left_undone(threads: DeviceThreads) -> None:
    ran: list[int] = []
    with pytest.raises(ValueError, match="first") as caught:
        threads.run([(1, fail(ValueError("first"))), (0, lambda: ran.append(0)), (3, lambda: ran.append(3))])
    assert ran == [0]
    assert caught.value.__notes__ == ["This was part 1 of 3 of the batch, on meta."]


@pytest.mark.parametrize("position", [0, 1])
def test_a_failure_holds_nothing_when_it_was_handled(position: int, threads: DeviceThreads) -> None:
    """Without waiting for the garbage collector: what failed may fill the memory of a device."""
    held: list[weakref.ref[Any]] = []

    def fails() -> None:
        large = torch.zeros(3)
        held.append(weakref.ref(large))
        raise ValueError("too bad")

    functions: list[tuple[int, Callable[[], None]]] = [(0, lambda: None), (1, lambda: None)]
    functions[position] = (position, fails)
    gc.disable()
    try:
        try:
            threads.run(functions)
        except ValueError as error:
            assert str(error) == "too bad"  # noqa: PT017 (pytest.raises would hold it for longer)
        threads.run([(0, lambda: None), (1, lambda: None)])  # the other thread has let go of its last work by then
        assert held[0]() is None
    finally:
        gc.enable()


# The end


def test_a_state_for_another_process_names_no_device() -> None:
    state = ThreadState.capture(["cpu"])
    assert state._replace(cuda_device=1, cuda_streams=("of cuda:1",)).without_devices() == state
