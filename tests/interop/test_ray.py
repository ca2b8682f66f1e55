"""Names of Ray that a version may lack; the tests under Ray itself are those of tests/extensions/ray."""

import logging
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.interop.ray import error_of_trial, error_of_worker, in_tune_session

TUNE = "ray.tune"
SESSION = "ray.tune.trainable.trainable_fn_utils"


def context(trial: str | None) -> Any:
    """The context of Tune, which complains outside of a trial."""

    def get_trial_id() -> str | None:
        if trial is None:
            logging.getLogger("ray.train._internal.session").warning("get_trial_id is meant for a trial")
            warnings.warn("get_trial_id is meant for a trial", stacklevel=2)
        return trial

    return SimpleNamespace(get_trial_id=get_trial_id)


@pytest.mark.parametrize("trial", ["7f_0001", None])
def test_a_trial_is_known_by_its_number(
    trial: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, TUNE, SimpleNamespace(get_context=lambda: context(trial)))
    monkeypatch.setitem(sys.modules, SESSION, SimpleNamespace())
    level = logging.getLogger("ray").level
    assert in_tune_session() == (trial is not None)
    assert not caplog.records
    assert logging.getLogger("ray").level == level
    # The private function comes first, as it says nothing.
    monkeypatch.setitem(sys.modules, SESSION, SimpleNamespace(_in_tune_session=lambda: trial is None))
    assert in_tune_session() == (trial is None)


def test_tune_that_is_still_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, TUNE, SimpleNamespace())
    assert not in_tune_session()


def test_errors_of_workers_and_trials() -> None:
    error = ValueError("of the user")
    assert error_of_worker(error) is error
    wrapper = RuntimeError("the whole traceback")
    wrapper._base_exc = error
    assert error_of_worker(wrapper) is error
    assert error_of_trial(SimpleNamespace(get_pickled_error=lambda: error)) is error
    assert error_of_trial(SimpleNamespace()) is None
