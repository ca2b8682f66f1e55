"""Scripts of a shell as commands of words."""

import re
import shlex
from collections.abc import Iterator

__all__ = ["commands_in"]

_SEPARATORS = set("&;|()<>")


def commands_in(script: str) -> list[list[str]]:
    """Return the commands of a script as words, in their order, without the variables that are set before them.

    Args:
        script: Lines with comments, continued lines and quotes.

    Example:
        >>> commands_in("cd a && RANK=0 equipoise fit 'x=[1, 2]' # both")
        [['cd', 'a'], ['equipoise', 'fit', 'x=[1, 2]']]
    """
    commands: list[list[str]] = []
    for line in _whole_lines(script):
        command: list[str] = []
        for word in [*_words(line), ";"]:
            if not set(word) <= _SEPARATORS:
                command.append(word)
            else:
                commands.append(_without_variables(command))
                command = []
    return [command for command in commands if command]


def _whole_lines(script: str) -> Iterator[str]:
    """Yield lines with those that continue them, behind a backslash or within quotes."""
    begun = ""
    for line in script.replace("\\\n", " ").splitlines():
        begun += line
        try:
            _words(begun)
        except ValueError:
            # The next line closes the quotation.
            begun += "\n"
        else:
            yield begun
            begun = ""
    if begun:
        raise ValueError(f"A quotation is not closed: {begun}")


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    return list(lexer)


def _without_variables(command: list[str]) -> list[str]:
    words = list(command)
    while words and re.match(r"\w+=", words[0]):
        words.pop(0)
    return words
