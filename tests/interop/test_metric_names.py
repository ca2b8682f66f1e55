"""The attributes in which torchmetrics keeps what belongs to a metric are found, whatever their names."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torchmetrics.metric
from torchmetrics import Metric, SumMetric

from equipoise.interop import metrics
from equipoise.interop.metric_names import find_names

NAMES = ("_forward_cache", "_computed", "_update_count", "_defaults", "_reductions")


def test_all_are_found_here() -> None:
    assert not metrics._MISSING
    assert not metrics._NOTES_LAST
    assert set(metrics._names) <= set(vars(SumMetric()))


@pytest.mark.parametrize("names", [NAMES, *((name,) for name in NAMES)])
def test_attributes_that_were_renamed(names: tuple[str, ...], tmp_path: Path) -> None:
    source = Path(torchmetrics.metric.__file__).read_text(encoding="utf-8")
    for name in names:
        source = source.replace(name, f"{name}_renamed")
    path = tmp_path / "renamed.py"
    path.write_text(source, encoding="utf-8")
    renamed = runpy.run_path(str(path), run_name="renamed")["Metric"]
    before, after = find_names(Metric), find_names(renamed)
    assert before == metrics._names
    for old, new in zip(before, after, strict=True):
        assert new == (f"{old}_renamed" if old in names else old)


def test_attributes_that_are_gone() -> None:
    class Without(Metric):
        """Keeps no values of batches, and its count elsewhere."""

        def __init__(self, **options: bool) -> None:
            super().__init__(**options)
            self.counts = {"updates": 0}

        def __setattr__(self, name: str, value: object) -> None:
            if name == "_update_count":
                vars(self)["counts"] = {"updates": value}
            elif name != "_forward_cache":
                super().__setattr__(name, value)

        def __getattr__(self, name: str) -> Any:
            if name == "_update_count":
                return vars(self)["counts"]["updates"]
            return super().__getattr__(name)

        def forward(self, value: Any) -> Any:
            self.update(value)
            result = self.compute()
            self._computed = None
            return result

    found = find_names(Without)
    assert (found.last, found.updates) == ("", "")
    assert (found.computed, found.defaults, found.reductions) == ("_computed", "_defaults", "_reductions")
