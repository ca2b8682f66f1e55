"""Pages for users stay short, and their code fits into the column of the site."""

import re
from pathlib import Path

import pytest

from tests.docs.blocks.pages import PAGES, ROOT, blocks_of, name_of

MOST_COLUMNS = 88
MOST_WORDS = 50_000
MOST_LINES_OF_THE_README = 100

FOR_CONTRIBUTORS = {"design", "experiments", "private_names", "releasing"}
FOLDERS = {ROOT, ROOT / "docs"}
USER_PAGES = [page for page in PAGES if page.parent in FOLDERS and page.stem not in FOR_CONTRIBUTORS]


def long_lines(page: Path) -> list[str]:
    """Return the lines of code that are shown and too long."""
    shown = [block for block in blocks_of(page) if block.language != "setup"]
    return [line for block in shown for line in block.source.splitlines() if len(line) > MOST_COLUMNS]


@pytest.mark.parametrize("page", USER_PAGES, ids=name_of)
def test_code_fits_into_its_column(page: Path) -> None:
    assert long_lines(page) == []


def test_all_pages_together_stay_short() -> None:
    words = sum(len(re.findall(r"\S+", page.read_text(encoding="utf-8"))) for page in USER_PAGES)
    assert words <= MOST_WORDS
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MOST_LINES_OF_THE_README
