"""Copies of callbacks hold no state of a run."""

import copy
from typing import Any

from equipoise import Callback
from equipoise.callbacks.copied_state import copied_state


class Counting(Callback):
    def __init__(self) -> None:
        self.counts = [1, 2]
        self._trainer: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return copied_state(self, _trainer=None)


def test_a_copy_has_the_results_and_nothing_of_the_run() -> None:
    callback = Counting()
    callback._trainer = object()
    callback.log = print  # a trainer binds the module's method
    callback.log_dict = print
    duplicate = copy.copy(callback)
    assert vars(duplicate) == {"counts": [1, 2], "_trainer": None}
    assert callback._trainer is not None
    assert callback.log is print
