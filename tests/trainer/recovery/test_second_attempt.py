"""A function that may run twice runs once more when memory runs out."""

import pytest
import torch

from equipoise.trainer.recovery.second_attempt import with_second_attempt


def failing(*errors: Exception) -> tuple[list[str], object]:
    """Return the record of a function's calls, and the function; it raises the errors one after the other."""
    calls: list[str] = []
    waiting = list(errors)

    def function() -> str:
        calls.append("call")
        if waiting:
            raise waiting.pop(0)
        return "result"

    return calls, function


def test_memory_is_freed_between_two_attempts() -> None:
    calls, function = failing(torch.OutOfMemoryError("out of memory"))
    assert with_second_attempt(function, lambda: calls.append("free")) == "result"
    assert calls == ["call", "free", "call"]


def test_a_second_failure_is_raised() -> None:
    calls, function = failing(MemoryError(), MemoryError("again"))
    with pytest.raises(MemoryError, match="again"):
        with_second_attempt(function, lambda: calls.append("free"))
    assert calls == ["call", "free", "call"]


def test_other_errors_are_raised_at_once() -> None:
    calls, function = failing(RuntimeError("a mistake"))
    with pytest.raises(RuntimeError, match="a mistake"):
        with_second_attempt(function, lambda: calls.append("free"))
    assert calls == ["call"]
