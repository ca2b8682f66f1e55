"""The messages that docs/troubleshooting.md quotes are those of the package."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.sources import FILES, nodes_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"

# Stands for what differs from case to case, on the page and in the source.
GAP = "…"
# Words between two gaps, such as "of", say nothing.
SHORTEST_PART = 8


def quoted_messages() -> list[str]:
    """Return the quoted messages of this package, which are lines of blocks of text."""
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@cache
def texts_of_the_package() -> tuple[str, ...]:
    """Return all texts in the source but docstrings, with a gap in place of each value."""
    texts = []
    for path in FILES:
        nodes = nodes_of(path)
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else GAP for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                texts.append(node.value)
    return tuple(texts)


def fixed_parts(message: str) -> list[str]:
    parts = [part.strip(" `'.:") for part in message.split(GAP)]
    return [part for part in parts if len(part) >= SHORTEST_PART]


def test_the_page_quotes_messages() -> None:
    assert len(quoted_messages()) > 40


@pytest.mark.few_cases(2)
@pytest.mark.whole_package
@pytest.mark.parametrize("message", quoted_messages())
def test_a_quoted_message_is_one_of_the_package(message: str) -> None:
    parts = fixed_parts(message)
    assert parts, "a quotation needs words of its own"
    missing = [part for part in parts if not any(part in text for text in texts_of_the_package())]
    assert missing == []
