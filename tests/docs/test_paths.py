"""The design and the records of decisions name files and folders that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "design.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]
MOST_LINES = 200
MOST_COLUMNS = 120
_PATH = re.compile(r"`(\w[\w.]*/[\w./]*|\w+\.py)`")


def missing_paths(text: str) -> list[str]:
    """Return the paths in a text that do not exist in the repository or the package; a bare name may lie anywhere."""
    missing = []
    for path in _PATH.findall(text):
        places = [ROOT / path, ROOT / "equipoise" / path]
        found = any(place.exists() for place in places)
        if not found and "/" not in path.rstrip("/"):
            found = any((ROOT / "equipoise").rglob(path.rstrip("/")))
        if not found:
            missing.append(path)
    return missing


@pytest.mark.whole_package
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_exist(page: Path) -> None:
    assert missing_paths(page.read_text(encoding="utf-8")) == []


def test_the_design_stays_short() -> None:
    lines = PAGES[0].read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MOST_LINES
    assert not [line for line in lines if len(line) > MOST_COLUMNS and not line.startswith("|")]
