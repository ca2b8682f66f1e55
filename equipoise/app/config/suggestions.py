"""Suggest the nearest known name for an unknown one."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["did_you_mean"]


def did_you_mean(name: str, options: Iterable[str], prefix: str = "") -> str:
    """Return the end of a sentence about an unknown name: the nearest option, or all options if none is near.

    Args:
        name: The unknown name.
        options: The names that are available. Those that begin with an underscore are ignored.
        prefix: Text before a name, such as `"trainer."`. Default: empty.

    Example:
        >>> did_you_mean("max_epoch", ["max_epochs", "max_steps"], "trainer.")
        "; did you mean 'trainer.max_epochs'?"
        >>> did_you_mean("x", ["max_epochs", "max_steps"])
        '; there are: max_epochs, max_steps.'
        >>> did_you_mean("x", [])
        '.'
    """
    names = sorted({option for option in options if not option.startswith("_")})
    matches = get_close_matches(name, names, n=1)
    if matches:
        nearest = prefix + matches[0]
        return f"; did you mean {nearest!r}?"
    if names:
        return f"; there are: {', '.join(names)}."
    return "."
