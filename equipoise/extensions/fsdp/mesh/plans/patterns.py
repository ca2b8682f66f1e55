"""Patterns of the dotted names of submodules and attributes."""

import re

__all__ = ["expression_of"]


def expression_of(pattern: str) -> re.Pattern[str]:
    """Return a pattern of names as a regular expression.

    Args:
        pattern: The pattern, in which * stands for anything between two dots, and ** for anything.
    """
    return re.compile(re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]*"))
