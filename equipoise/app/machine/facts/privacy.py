"""Texts without what a bug report must not show: paths, names of users, secrets."""

import os
import re
from pathlib import Path

__all__ = ["is_private", "without_paths"]

# Words in names of variables.
_SECRETS = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIAL")
# A path from the root or from a home.
_PATH = re.compile(r"(?<![\w.])~?/[^\s'\"(),;]+")
# Characters of a message: some contain whole sources.
_LONGEST = 500


def is_private(name: str, value: str) -> bool:
    """Return True if the value of an environment variable may be a path, a user's name or a secret.

    Example:
        >>> is_private("TORCH_HOME", "/home/user/torch"), is_private("NCCL_DEBUG", "INFO")
        (True, False)
    """
    if "/" in value or "\\" in value:
        return True
    if any(word in name for word in _SECRETS):
        return True
    return _without_users(value) != value


def without_paths(message: str) -> str:
    """Return the first line of an error's message, with dots in place of paths and of the user's name.

    Example:
        >>> without_paths("cannot import name 'f' from 'g' (/home/user/g.py)")
        "cannot import name 'f' from 'g' (...)"
    """
    first_line, _, _ = message.strip().partition("\n")
    return _without_users(_PATH.sub("...", first_line[:_LONGEST]))


def _without_users(text: str) -> str:
    """Return a text with dots in place of the user's name."""
    home = Path(os.environ.get("HOME", ""))
    names = {os.environ.get("USER"), os.environ.get("LOGNAME"), home.name}
    for name in names:
        if name:
            text = re.sub(rf"\b{re.escape(name)}\b", "...", text)
    return text
