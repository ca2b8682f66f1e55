"""`make docs` builds a site without a warning, and each page has one place in its table of contents."""

import re
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.docs.blocks.pages import PAGES, ROOT, name_of

CONTENTS = runpy.run_path(str(ROOT / "docs" / "_site" / "contents.py"), run_name="contents")


def test_each_page_has_one_place() -> None:
    pages = {name_of(page).removesuffix(".md") for page in PAGES if page.parent != ROOT} - {"docs/index"}
    groups = CONTENTS["pages_by_group"](pages)
    places = Counter(page for members in groups.values() for page in members)
    for parent in CONTENTS["CHILDREN"]:
        places.update(CONTENTS["pages_below"](parent, pages))
    assert set(places) == pages
    assert set(places.values()) == {1}


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("furo")
    options = ["--fail-on-warning", "--keep-going", "--nitpicky", "--quiet", "--conf-dir", "docs"]
    folders = ["--doctree-dir", str(tmp_path / "doctrees"), str(ROOT), str(tmp_path / "site")]
    command = [sys.executable, "-m", "sphinx", *options, *folders]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "site" / "docs" / "index.html").read_text(encoding="utf-8")
    assert 'href="memory.html"' in page
    reference = (tmp_path / "site" / "docs" / "reference" / "trainer.html").read_text(encoding="utf-8")
    assert 'id="equipoise.Trainer.fit"' in reference
    # What screen readers need: headings have a level, lists of descriptions have terms.
    assert 'role="heading" aria-level="2"' in page
    assert 'role="heading">' not in page + reference
    assert '<aside aria-label="Site" class="sidebar-drawer">' in page
    assert "<dl>" not in reference
    assert '<ul class="parameters"><li>' in reference
    differences = (tmp_path / "site" / "docs" / "differences.html").read_text(encoding="utf-8")
    assert '<td class="head"></td>' in differences
    assert not re.search(r"<th[^>]*>\s*(<p>\s*</p>)?\s*</th>", differences)
    assert "<em>~" not in reference
    assert '<span class="pre">accumulate_<wbr>grad_<wbr>batches</span>' in differences
    assert '<span class="pre">Early<wbr>Stopping</span>' in differences
    # Pages that docstrings name.
    assert 'href="../choosing.html"' in reference
    assert "docs/choosing.md" not in reference
