"""Suggest the nearest known name for an unknown one."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from equipoise.names.synonyms import meant_keys

__all__ = ["did_you_mean", "unknown_trainer_key"]


def did_you_mean(name: str, options: Iterable[str], prefix: str = "", meant: Sequence[str] = ()) -> str:
    """Return the end of a sentence about an unknown name: the nearest option, or all options if none is near.

    Args:
        name: The unknown name.
        options: The names that are available. Those that begin with an underscore are ignored.
        prefix: Text before a name, such as `"trainer."`. Default: empty.
        meant: Names that have the meaning of the unknown one; the first is suggested whatever is near. Default: none.

    Example:
        >>> did_you_mean("max_epoch", ["max_epochs", "max_steps"], "trainer.")
        "; did you mean 'trainer.max_epochs'?"
        >>> did_you_mean("x", ["max_epochs", "max_steps"])
        '; there are: max_epochs, max_steps.'
        >>> did_you_mean("x", [])
        '.'
    """
    if meant:
        return f"; did you mean {meant[0]!r}?"
    names = sorted({option for option in options if not option.startswith("_")})
    matches = get_close_matches(name, names, n=1) or get_close_matches(name.lower(), names, n=1)
    if matches:
        nearest = prefix + matches[0]
        return f"; did you mean {nearest!r}?"
    if names:
        return f"; there are: {', '.join(names)}."
    return "."


def unknown_trainer_key(name: str, arguments: Iterable[str]) -> str:
    """Return the message about a key of the trainer that does not exist. There are too many to list all of them.

    Args:
        name: The key, without "trainer.".
        arguments: The keys that exist.

    Example:
        >>> unknown_trainer_key("gpus", ["devices"])
        "There is no key 'trainer.gpus' in the configuration; did you mean 'trainer.devices'?"
    """
    hint = did_you_mean(name, arguments, "trainer.", meant_keys(name))
    if "; did you mean" not in hint:
        hint = "; `equipoise fit --help trainer` explains those that there are."
    return f"There is no key 'trainer.{name}' in the configuration{hint}"
