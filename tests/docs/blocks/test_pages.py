"""Blocks are found on a page as `tests/docs/blocks/pages.py` describes them."""

from pathlib import Path

import pytest

from tests.docs.blocks.pages import blocks_of
from tests.docs.blocks.python_blocks import run_python


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return tmp_path / "page.md"


def test_a_block_has_a_mark_and_a_file(page: Path) -> None:
    page.write_text("<!-- run -->\n```bash\n# job.sh\necho\n```\n")
    (block,) = blocks_of(page)
    assert (block.mark, block.file) == ("run", "job.sh")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Text:\n\n    x = 1\n", "indented"),
        ("```\nx = 1\n```\n", "language"),
        ("<!-- run -->\n\nText\n", "directly above"),
        ("<!-- not run -->\n```python\nx = 1\n```\n", "says why"),
    ],
)
def test_what_would_be_passed_over_is_refused(page: Path, text: str, message: str) -> None:
    page.write_text(text)
    with pytest.raises(ValueError, match=message):
        blocks_of(page)


def test_a_doctest_is_compared_and_keeps_its_names(page: Path) -> None:
    page.write_text("```python\n>>> y = x + 1\n>>> y\n2\n```\n")
    names = {"x": 1}
    run_python(blocks_of(page)[0], names)
    assert names["y"] == 2
    with pytest.raises(AssertionError, match="Expected:\n    2"):
        run_python(blocks_of(page)[0], {"x": 2})
