"""Every link within the repository leads to something that exists. Links to other sites are not followed."""

from pathlib import Path

import pytest

from tests.docs.blocks.pages import ROOT, name_of
from tests.docs.site.links import broken_links, slugs

FOLDERS = ("benchmarks", "docs", "examples", "tests")
PAGES = sorted(
    path
    for pattern in ("*.md", *(f"{folder}/**/*.md" for folder in FOLDERS))
    for path in ROOT.glob(pattern)
    if "_build" not in path.parts and "outputs" not in path.parts
)


@pytest.mark.few_cases(48)
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links(page: Path) -> None:
    assert not broken_links(page)


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `b` c: d\n\n## A b c d\n\n## _x_\n")
    (tmp_path / "picture.svg").touch()
    page = tmp_path / "page.md"
    good = "[a](other.md) [b](other.md#a-b-c-d-1) [c](#here) [d](https://nowhere.invalid) ![e](picture.svg) [f](.)"
    bad = "[g](missing.md) [h](other.md#missing) ![i](missing.svg) [j](#missing)"
    page.write_text(f'# Here\n\n{good}\n\n{bad}\n\n<img src="missing.png">\n')
    assert slugs(tmp_path / "other.md") == ["a-b-c-d", "a-b-c-d-1", "x"]
    assert broken_links(page) == ["missing.md", "other.md#missing", "missing.svg", "#missing", "missing.png"]
