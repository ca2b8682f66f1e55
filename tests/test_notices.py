"""Warnings point at the line of the user that led to them."""

import inspect
import warnings
from pathlib import Path

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only

from equipoise.notices import rank_zero_warn, warn_of_method
from tests.support.programs import Program
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


SCRIPT = """
from tests.support.trainer_runs import Validated, loader, trainer
trainer().fit(Validated(), loader())  # here
"""


@pytest.mark.slow
def test_a_printed_warning_shows_the_line_of_the_script(tmp_path: Path):
    """The warning as it is printed: file, line and source are the script's."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with Program(script.read_text(), path=script, shows_warnings=True) as program:
        complaints = program.finish()[1]
    lines = [line for line in complaints.splitlines() if "script.py" in line or "# here" in line]
    assert lines[0].startswith(f"{script}:3: UserWarning: Validated has a `validation_step`")
    assert lines[1].strip().endswith("# here")
