"""The campaign counts what fails, ends what it starts, and has the orders that its seeds say."""

from pathlib import Path
from types import ModuleType

import pytest

from tests.support.benchmarks import Scripts

TESTS = """
import sys
def test_that_passes(): pass
def test_that_fails(): assert False
def test_that_is_skipped():
    import pytest
    pytest.skip("on purpose")
"""


@pytest.fixture
def campaign(scripts: Scripts) -> ModuleType:
    """The benchmark's script."""
    return scripts("suite_order", "main")["main"]


@pytest.mark.slow
def test_a_failing_test_is_named(campaign: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("random_order")
    (tmp_path / "test_sample.py").write_text(TESTS)
    table = tmp_path / "table.md"
    options = ["--workers", "0", "--logs", str(tmp_path / "logs"), "--markdown", str(table), "--seed", "7"]
    assert campaign.main(["--runs", "2", "--busy", "1", "--busy-runs", "1", *options, str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "test_sample.py::test_that_fails" in out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.read_text().splitlines()[2:]]
    assert [row[:6] for row in rows] == [["1", "7", "0", "1", "1", "1"], ["2", "8", "1", "1", "1", "1"]]
    assert [row[-1] for row in rows] == ["finished"] * 2
    assert "random-order-seed=8" in (tmp_path / "logs" / "8.log").read_text()


def test_a_run_that_takes_too_long_is_ended(campaign: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("random_order")
    (tmp_path / "test_sample.py").write_text("import threading\ndef test_that_hangs(): threading.Event().wait()\n")
    outcome = campaign.run_once(1, 0, 0, 0.1, tmp_path, [str(tmp_path / "test_sample.py")])
    assert outcome.end == "not finished in 0 minutes"
    assert not outcome.succeeded
