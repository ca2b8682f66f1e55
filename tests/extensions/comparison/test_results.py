"""Results of a comparison: the recommended strategy with its reason, notes, and predicted peaks where there are any."""

import csv
import json
from pathlib import Path

import pytest

from equipoise.extensions.comparison.results.comparison import Comparison, Row
from equipoise.extensions.comparison.results.recommendation import notes_on, recommend
from equipoise.extensions.comparison.results.tables import meaning_of_columns, row_texts


def comparison(**figures: tuple[float | None, int]) -> Comparison:
    """Return results of strategies: their rates, and the peaks of their fullest devices."""
    rows = []
    for label, (rate, peak) in figures.items():
        row = Row(label, [f"strategy={label}"])
        row.note({"peaks": {"cpu (0)": peak, "cpu (1)": 1}, "seconds": 1.0, "samples_per_second": rate})
        rows.append(row)
    return Comparison("Net", ["cpu (0)", "cpu (1)"], 8, 5, rows=rows)


@pytest.mark.parametrize(
    ("figures", "chosen", "reason"),
    [
        ({"a": (100, 10), "b": (200, 90)}, "b", "It is the fastest, with 200 samples per second, before a with 100"),
        ({"a": (196, 90), "b": (200, 50)}, "b", "as fast as a, with 200 samples per second, and needs least"),
        (
            {"a": (196, 51), "b": (200, 50), "c": (100, 1)},
            "a",
            "as fast as b, with 196 samples per second, and the simplest",
        ),
        ({"a": (100, 10)}, "a", "the only one"),
        ({"a": (None, 10), "b": (1, 10)}, "b", "the only one"),
    ],
)
def test_the_fastest_strategy_is_recommended(figures: dict[str, tuple[float, int]], chosen: str, reason: str) -> None:
    recommended = recommend(comparison(**figures))
    assert recommended["strategy"] == chosen
    assert reason in recommended["reason"]
    assert recommended["overrides"] == [f"strategy={chosen}"]


def test_nothing_to_recommend() -> None:
    assert recommend(comparison(a=(None, 1))) is None
    assert recommend(Comparison("Net", ["cpu"], 8, 5, rows=[Row("a", reason="no")])) is None


def test_only_columns_of_the_table_are_explained() -> None:
    one = comparison(a=(100, 10), b=(50, 10))
    for row in one.rows:
        row.peaks = {"cpu": 10}
    assert list(row_texts(one.rows[0], one)) == ["samples/s", "peak by device"]
    assert meaning_of_columns(one) == []
    one.rows[1].peaks = {"cpu (0)": 30, "cpu (1)": 10}
    one.rows[1].distance = 0.0
    assert (one.rows[0].imbalance, one.rows[1].imbalance, one.rows[1].fullest) == (None, 1.5, 30)
    assert list(row_texts(one.rows[0], one)) == ["samples/s", "peak by device", "imbalance", "distance"]
    (sentence,) = meaning_of_columns(one)
    assert sentence.startswith("imbalance: ")
    assert "idle" not in sentence


def test_notes_on_devices_that_are_not_as_they_seem() -> None:
    assert notes_on(["cuda:0", "cuda:1"], has_batch_size=True) == []
    assert len(notes_on(["cpu", "cpu"], has_batch_size=False)) == 3
    cores, peak = notes_on(["cuda:0", "cuda:0"], has_batch_size=True)
    assert "share their cores" in cores
    assert "that of all its parts" in peak


def test_predicted_peaks_stand_beside_measured_ones(tmp_path: Path) -> None:
    """Without a prediction there is no column."""
    results = comparison(a=(100, 10), b=(200, 90))
    path = tmp_path / "compare.csv"
    results.write_csv(path)
    assert "predicted" not in path.read_text() + results.to_json(None)
    assert "predicted" not in row_texts(results.rows[0], results)

    results.rows[1].predicted = {"cpu (0)": 89, "cpu (1)": 2}
    results.write_csv(path)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["predicted peak of cpu (1)"] for row in rows] == ["", "2"]
    assert [row["peak of cpu (0)"] for row in rows] == ["10", "90"]
    assert json.loads(results.to_json(None))["rows"][1]["predicted_peaks"] == {"cpu (0)": 89, "cpu (1)": 2}
    assert [row_texts(row, results)["predicted"] for row in results.rows] == ["-", "89 B | 2 B"]
