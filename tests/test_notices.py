"""Warnings point at the line of the user that led to them."""

import inspect
import warnings

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only

from equipoise.notices import rank_zero_warn, warn_of_method
from tests.support.trainer_runs import Validated, loader, trainer


def line_here() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_warning_of_the_trainer_names_the_call_of_fit():
    run = trainer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Validated(), loader())
        line = line_here() - 1
    (found,) = [each for each in caught if "will not be validated" in str(each.message)]
    assert (found.filename, found.lineno) == (__file__, line)


def test_a_warning_from_the_users_own_line_names_that_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rank_zero_warn("Look here.", category=RuntimeWarning)
        line = line_here() - 1
    assert [(each.filename, each.lineno, each.category) for each in caught] == [(__file__, line, RuntimeWarning)]


def test_only_the_first_process_warns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    rank_zero_warn("Nobody reads this.")
    warn_of_method(line_here, "Nor this.")
