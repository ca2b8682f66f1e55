"""Pages of the documentation, and the blocks of code on them, in their order.

A comment directly above a block says what is done with it:

    <!-- run -->               the commands of a bash block really run
    <!-- not run: REASON -->   the block is read, not run

Code that a page needs and does not show stands in a comment that begins with `<!-- setup` on a line of its own.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

__all__ = ["LANGUAGES", "PAGES", "ROOT", "Block", "blocks_of", "name_of"]

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
    *sorted((ROOT / "examples").glob("*/README.md")),
]

# What is run or parsed, and what is only shown.
LANGUAGES = ("python", "bash", "yaml", "json", "toml", "text", "diff")

_SETUP = re.compile(r"<!-- setup\n(.*)^ *-->\s*\Z", flags=re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"<!-- *(run|not[ -]run)\b(.*?)-->\s*\Z", flags=re.DOTALL)
# A block that begins with the name of a file is that file: `# conf/module/net.yaml`.
_FILE = re.compile(r"\A(?:#!.*\n)?(?:# @package.*\n)?# ([\w./-]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """A block of code on a page.

    Attributes:
        page: The file.
        line: Number of the first line of code, from 1.
        language: What stands behind the fence, or "setup".
        source: The code, as lines that end with a newline.
        mark: "run", "not run" or nothing.
    """

    page: Path
    line: int
    language: str
    source: str
    mark: str = ""

    @property
    def place(self) -> str:
        """Return the page and the line of the block, for messages."""
        return f"{name_of(self.page)}:{self.line}"

    @property
    def file(self) -> str | None:
        """Name of the file that the block is, where its first line names one."""
        found = _FILE.match(self.source)
        return found[1] if found else None


def name_of(page: Path) -> str:
    """Return the name of a page within the repository."""
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page, the hidden ones included.

    Raises:
        ValueError: If code is indented instead of fenced, a fence has no known language, or a mark no block or reason.
    """
    tokens = MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
    return list(_blocks(page, tokens))


def _blocks(page: Path, tokens: list[Token]) -> Iterator[Block]:
    mark = ""
    for token in tokens:
        if token.map is None:
            continue
        line = token.map[0] + 1
        place = f"{name_of(page)}:{line}"
        if mark and token.type != "fence":
            raise ValueError(f"{place}: a comment that says how a block is run stands directly above the block.")
        if token.type == "code_block":
            raise ValueError(f"{place}: this code is indented; fence it, and name its language.")
        if token.type == "html_block":
            setup = _SETUP.match(token.content)
            if setup:
                yield Block(page, line + 1, "setup", setup[1])
            mark = _mark(token.content, place)
        if token.type == "fence":
            language = token.info.strip()
            if language.startswith("{"):
                continue  # a directive of the site
            if language not in LANGUAGES:
                raise ValueError(f"{place}: the language of a block is one of {LANGUAGES}, not {language!r}.")
            yield Block(page, line + 1, language, token.content, mark)
            mark = ""


def _mark(comment: str, place: str) -> str:
    """Return what a comment says about the block below it."""
    found = _MARK.match(comment)
    if found is None:
        return ""
    mark, rest = found[1], found[2].strip()
    if mark == "run":
        return "run"
    if mark != "not run" or not re.match(r": *\w", rest):
        raise ValueError(f"{place}: what is not run says why, as in <!-- not run: needs a GPU -->.")
    return "not run"
