"""Private names are looked up without an import that fails, and a feature that lacks one is refused."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from equipoise.app.machine.facts.features import all_features
from equipoise.errors import ConfigurationError
from equipoise.interop import refusal, versions
from equipoise.interop.adapters import Adapter, Feature, check_feature, find, find_if_tested
from tests.support.sources import FILES, holds_private_names

NEEDED = Adapter("numpy", ("math.tau", "math._needed", "math._also_needed"))
REPLACED = Adapter("numpy", ("math.pi", "math._replaced"), "it is computed")
PRESENT = Adapter("numpy", ("math.e",))
LACKING = Feature("lacking", "Lacking(x=1)", (NEEDED, REPLACED, PRESENT))
MAKING_DO = Feature("making do", "Making do", (REPLACED,))
WHOLE = Feature("whole", "Whole", (PRESENT,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("math", math),
        ("math.tau", math.tau),
        ("math._tau", None),
        ("math.tau._real", None),
        ("no_such_module.name", None),
        ("collections.abc.Mapping.get", Mapping.get),
    ],
)
def test_a_name_is_found_or_none(name: str, value: Any) -> None:
    assert find(name) is value or find(name) == value


def test_a_module_that_fails_to_import_has_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_to_import.py").write_text("from math import _nothing\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find("fails_to_import.name") is None


@pytest.mark.parametrize("feature", [MAKING_DO, WHOLE], ids=lambda feature: feature.key)
def test_a_feature_that_can_do_without_is_allowed(feature: Feature) -> None:
    check_feature(feature)


def test_a_feature_that_lacks_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed_version", lambda package: "9.9")
    monkeypatch.setattr(refusal, "installed_version", lambda package: "9.9")
    oldest, newest = versions.TESTED["numpy"]
    with pytest.raises(ConfigurationError) as refused:
        check_feature(LACKING)
    assert str(refused.value) == (
        "Lacking(x=1) does not work with numpy 9.9, which lacks math._needed, math._also_needed."
        f" It was tested with numpy {oldest} to {newest}: pip install 'numpy>={oldest},<={newest}'."
    )


# The tables of the core and of extensions.


def all_names() -> set[str]:
    return {name for feature in all_features() for adapter in feature.adapters for name in adapter.names}


def test_a_short_cut_is_not_taken_with_a_version_that_was_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_if_tested("math.tau") == math.tau
    assert find_if_tested("math._tau") is None
    monkeypatch.setattr(versions, "TESTED", {"torch": ("2.0.0", "2.1.0")})
    assert find_if_tested("math.tau") is None


@pytest.mark.whole_package
def test_the_names_that_are_looked_up_are_in_the_tables() -> None:
    names = all_names()
    sources = [
        path.read_text(encoding="utf-8")
        for path in FILES
        if holds_private_names(path) and path.name not in ("adapters.py", "features.py")
    ]
    found = {name for text in sources for name in re.findall(r'find(?:_if_tested)?\("([\w.]+)"', text)}
    # Operators of torch are public.
    private = {name for name in found if not name.startswith("torch.ops.")}
    # Names of Lightning have a table of their own, in `docs/private_names.md`.
    of_lightning = {name for name in private if name.startswith("lightning.")}
    assert of_lightning
    page = (Path(__file__).parents[2] / "docs" / "private_names.md").read_text(encoding="utf-8")
    assert {name for name in of_lightning if f"`{name}`" not in page} == set()
    private -= of_lightning
    assert len(private) >= 15
    assert {name for name in private if not any(listed.startswith(name) for listed in names)} == set()


@pytest.mark.whole_package
def test_the_page_lists_the_names() -> None:
    table = (Path(__file__).parents[2] / "docs" / "private_names.md").read_text(encoding="utf-8")
    names = all_names()
    assert {name for name in names if f"`{name}`" not in table} == set()
    first_cells = "\n".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| "))
    assert {name for name in re.findall(r"`(torch\.[\w.]+)`", first_cells) if name not in names} == set()
