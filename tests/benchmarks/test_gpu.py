"""The campaign for a GPU: it runs without one, keeps what it has found, and tells what is broken."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import campaign
from benchmarks.gpu.campaign import ITEMS, Item, Outcome, Row
from tests.simulated.devices.build import NotBuildable, built_extension

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("quick_collections")]

# The tests run by themselves, and a compiler takes minutes.
LONG = [1, 11, 14]


FAILING = """
import json, sys
row = {"what": "first", "value": 1.0, "unit": "", "bound": "", "is_kept": None, "is_time": False}
print(json.dumps(row), file=open(sys.argv[1], "w"))
raise ValueError("planned")
"""


def test_an_item_that_fails_keeps_what_it_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run_limited = campaign.run_limited

    def run_code(arguments: Any, limit: float) -> str:
        path = arguments[arguments.index("--out") + 1]
        return run_limited([sys.executable, "-c", FAILING, path], limit)

    monkeypatch.setattr(campaign, "run_limited", run_code)
    outcome = campaign.run_item(Item(99, "code", "", 120.0), [], 120.0)
    assert outcome.rows == (Row("first", 1.0),)
    assert outcome.problem == "exit code 1: ValueError: planned"
    assert not outcome.is_good


@pytest.mark.parametrize(
    ("row", "is_good"),
    [
        (Row.at_most("bound", 2.0, 2.0), True),
        (Row.at_most("bound", 2.1, 2.0), False),
        (Row.at_most("bound", 2.1, 2.0, is_time=True).unjudged(), True),
        (Row.holds("truth", False), False),
    ],
)
def test_verdict(row: Row, is_good: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "run_item", lambda item, *_: Outcome(item, (row,), 1.0))
    assert command.main(["--items", "2"]) == int(not is_good)
    printed = capsys.readouterr().out
    assert row.what in printed
    assert ("none." in printed) == is_good


# The command starts a process for each item. One process for all of them imports everything only once.
IN_ONE_PROCESS = """
import sys
from benchmarks.gpu.__main__ import main

folder, *numbers = sys.argv[1:]
for number in numbers:
    main(["--child", number, "--out", f"{folder}/{number}", "--simulated"])
"""


@pytest.mark.slow
def test_items_on_simulated_devices(tmp_path: Path) -> None:
    try:
        built_extension()
    except NotBuildable as reason:
        pytest.skip(f"no devices can be simulated: {reason}")
    numbers = [str(item.number) for item in ITEMS if item.number not in LONG]
    command = [sys.executable, "-c", IN_ONE_PROCESS, str(tmp_path), *numbers]
    problem = campaign.run_limited(command, 800.0)
    rows = {}
    for number in numbers:
        path = tmp_path / number
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        rows[number] = [json.loads(line) for line in lines]
    broken = [row for of_item in rows.values() for row in of_item if row.get("is_kept") is False or "skipped" in row]
    assert not problem, (problem, broken)
    assert not broken
    assert all(rows.values()), {number: len(of_item) for number, of_item in rows.items()}
