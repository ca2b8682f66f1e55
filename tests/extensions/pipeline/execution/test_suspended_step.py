"""Steps that stop where they call the network, and continue with its output."""

import threading
from typing import Any

import pytest
import torch

from equipoise import StepError
from equipoise.extensions.pipeline.execution.suspended_step import (
    SuspendedStep,
    current_step,
    inside_stage,
    is_inside_stage,
)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def network(*args: Any, **kwargs: Any) -> Any:
    step = current_step()
    assert step is not None
    return step.suspend("", args, kwargs)


def test_a_step_stops_at_the_network_and_goes_on():
    order = []

    def function() -> str:
        order.append("before")
        output = network(1, two=2)
        order.append(f"after {output}")
        return "done"

    step = SuspendedStep(function)
    assert current_step() is None
    step.start()
    order.append("computed")
    assert (step.call, step.ended) == (((1,), {"two": 2}), False)
    step.resume("output")
    assert (order, step.result, step.ended) == (["before", "computed", "after output"], "done", True)


def test_a_step_without_a_call_ends_at_once():
    step = SuspendedStep(lambda: 3)
    step.start()
    assert (step.call, step.result, step.ended) == (None, 3, True)
    step.abandon()


def test_it_computes_in_the_callers_modes():
    seen = []

    def function() -> None:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        network()

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        step = SuspendedStep(function)
        step.start()
    assert seen == [(False, True)]
    assert step.state is not None
    assert not step.state.grad
    step.resume(None)


@pytest.mark.parametrize("before", [True, False])
def test_errors_are_raised_where_somebody_waits(before):
    def function() -> None:
        if before:
            raise KeyError("mine")
        network()
        raise KeyError("mine")

    step = SuspendedStep(function)
    if not before:
        step.start()
    with pytest.raises(KeyError, match="mine"):
        step.start() if before else step.resume(None)
    assert step.ended


def test_a_second_call_is_refused():
    step = SuspendedStep(lambda: (network(), network()))
    step.start()
    with pytest.raises(StepError, match="calls the network twice"):
        step.resume(None)


def test_an_abandoned_step_unwinds_past_what_catches_errors():
    unwound = []

    def function() -> None:
        try:
            network()
        except Exception:
            unwound.append("caught")
        finally:
            unwound.append("finally")

    step = SuspendedStep(function)
    step.start()
    step.abandon()
    step.abandon()
    assert unwound == ["finally"]
    assert step.ended


def test_inside_a_stage():
    assert not is_inside_stage()
    with inside_stage():
        with inside_stage():
            pass
        assert is_inside_stage()
    assert not is_inside_stage()
