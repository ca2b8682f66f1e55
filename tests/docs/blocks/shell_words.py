"""Scripts of a shell as commands of words."""

import re
import shlex

__all__ = ["commands_in"]

_SEPARATORS = "&;|()<>\n"


def commands_in(script: str) -> list[list[str]]:
    """Return the commands of a script as words, in their order, without the variables that are set before them.

    Args:
        script: Lines with comments, continued lines and quotes.

    Example:
        >>> commands_in("cd a && RANK=0 equipoise fit 'x=[1, 2]' # both")
        [['cd', 'a'], ['equipoise', 'fit', 'x=[1, 2]']]
    """
    text = re.sub(r"(^|\s)#.*", r"\1", script.replace("\\\n", " "))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.commenters, lexer.whitespace, lexer.whitespace_split = "", " \t", True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set(_SEPARATORS):
            commands.append([])
        elif commands[-1] or not re.match(r"\w+=", word):
            commands[-1].append(word)
    return [command for command in commands if command]
