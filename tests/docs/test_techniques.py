"""Each technique of the inventory has its entry in docs/techniques, with something to run."""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "techniques"
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "index.md")

# The inventory: by group, the number of its rows.
ROWS_OF_GROUP = {"A": 14, "B": 14, "C": 15, "D": 4, "E": 7, "F": 4, "G": 8, "H": 18, "I": 3, "K": 6}
ROWS = [f"{group}{number}" for group, rows in ROWS_OF_GROUP.items() for number in range(1, rows + 1)]

HEADING = re.compile(r"^## (?P<row>[A-Z]\d+)\. (?P<title>.+)$", flags=re.MULTILINE)
BLOCK = re.compile(r"(?P<before>[^\n]*)\n```(?P<language>\w+)\n(?P<code>.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@cache
def entries() -> dict[str, str]:
    """Return the text of each entry, by its row."""
    texts = {}
    for path in PAGES:
        rows = list(HEADING.finditer(path.read_text(encoding="utf-8")))
        for heading, following in zip(rows, [*rows[1:], None], strict=True):
            end = len(heading.string) if following is None else following.start()
            texts[heading["row"]] = heading.string[heading.end() : end]
    return texts


def anchor(heading: str) -> str:
    """Return the anchor that a forge and the site give to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower().replace(" ", "-"))


def is_runnable(block: re.Match[str]) -> bool:
    if block["before"].startswith("<!-- not run"):
        return False
    return block["language"] == "python" or block["code"].startswith("equipoise ")


def test_each_row_has_one_entry() -> None:
    found = Counter(heading["row"] for path in PAGES for heading in HEADING.finditer(path.read_text(encoding="utf-8")))
    assert found == Counter(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_an_entry_says_what_is_claimed_what_is_true_and_how_it_is_done_in_a_block_that_runs(row: str) -> None:
    text = entries()[row]
    parts = ["\n**The article|\n**The notes|\n**One of the articles", "\n**Today**", "\n**Here**"]
    missing = [part for part in parts if not any(beginning in text for beginning in part.split("|"))]
    assert not missing
    assert any(is_runnable(block) for block in BLOCK.finditer(text))


def test_the_index_lists_all_entries() -> None:
    lines = []
    for path in PAGES:
        for heading in HEADING.finditer(path.read_text(encoding="utf-8")):
            row, title = heading["row"], heading["title"]
            lines.append(f"| [{row}]({path.name}#{anchor(heading[0][3:])}) | {title} |")
    index = (FOLDER / "index.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line not in index] == []
