"""Python of a page: one program in one namespace, whose line numbers are those of the page."""

import doctest
from typing import Any

from tests.docs.blocks.pages import Block

__all__ = ["check_python", "run_python"]

_DOCTEST_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def check_python(block: Block) -> None:
    """Compile a block without running it."""
    if not _has_prompts(block):
        _compiled(block)


def run_python(block: Block, names: dict[str, Any]) -> None:
    """Run a block, as a doctest if it has prompts.

    Args:
        block: What to run.
        names: The namespace of the page, which the block extends.

    Raises:
        AssertionError: If an example of a doctest prints something else.
    """
    if _has_prompts(block):
        _run_examples(block, names)
    else:
        exec(_compiled(block), names)  # noqa: S102  the documentation's own code


def _has_prompts(block: Block) -> bool:
    return any(line.startswith(">>> ") for line in block.source.splitlines())


def _compiled(block: Block) -> Any:
    """Compile a block so that tracebacks show the lines of the page."""
    lines_above = "\n" * (block.line - 1)
    return compile(lines_above + block.source, str(block.page), "exec")


def _run_examples(block: Block, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.source, names, block.place, str(block.page), block.line - 1)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=_DOCTEST_OPTIONS).run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    assert result.failed == 0, "".join(report)
