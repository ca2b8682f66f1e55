"""Completion in a shell: commands and flags by the program itself, keys by Hydra, which does not know commands."""

import contextlib
import io
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from equipoise.app.command_line.commands import command_named, names_of_commands
from equipoise.app.command_line.flags import STAGE_FLAGS
from equipoise.app.command_line.folders import starter_folder, take_folders
from equipoise.app.command_line.hydra_calls import import_compose
from equipoise.app.config.keys import STAGES
from equipoise.errors import ConfigurationError

__all__ = ["SHELLS", "complete", "flags_of", "print_completion"]

SHELLS = ("bash", "zsh", "fish")


def print_completion(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    """Print what a shell evaluates, so that it completes commands and keys.

    Args:
        arguments: The name of the shell.
        folders: None.

    Raises:
        ConfigurationError: If it is none of `SHELLS`.
    """
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        text = " ".join(arguments) or "nothing"
        raise ConfigurationError(f"equipoise completion takes one of {', '.join(SHELLS)}; it was given {text}.")
    import_compose().complete([f"install={arguments[0]}"], [starter_folder() / "conf"])


def complete(arguments: Sequence[str]) -> None:
    """Print the completions of a line; the functions that Hydra has installed in a shell call this."""
    if not arguments or not arguments[0].startswith("query="):
        import_compose().complete(arguments, [starter_folder() / "conf"])
        return

    # 1. The line up to the cursor, and the word that the user has begun.
    cursor = int(os.environ.get("COMP_POINT") or sys.maxsize)
    line = os.environ.get("COMP_LINE", "")[:cursor]
    complete_words = line.split()
    word = ""
    if complete_words and not line.endswith(" "):
        word = complete_words.pop()

    # 2. A command, a flag, or a key. An unfinished line may be wrong in any way, and a message would appear in the
    #    middle of it.
    if len(complete_words) < 2:
        _print_beginning_with(word, (*STAGES, *names_of_commands()))
        return
    _, command, *words = complete_words
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception, SystemExit):
        if word.startswith("-"):
            _print_beginning_with(word, flags_of(command))
        elif command in STAGES or command_named(command).reads_configuration:
            _complete_key(arguments, words, word)


def flags_of(command: str) -> Iterable[str]:
    """Return the flags of a command. Those with a value that must follow end with "="."""
    if command in STAGES:
        return STAGE_FLAGS
    named = command_named(command)
    flags = {*named.flags, "--debug", "--help"}
    if named.reads_configuration:
        flags.add("--config-dir")
    return sorted(flags)


def _complete_key(arguments: Sequence[str], words: Sequence[str], word: str) -> None:
    """Let Hydra print completions of a word after others, without the command and `--config-dir`."""
    if word:
        words = [*words, word]
    overrides, folders = take_folders(words)
    # Hydra completes the line that is in the environment. After a space no word has begun.
    line = " ".join(["equipoise", *overrides])
    if not word:
        line += " "
    os.environ["COMP_LINE"] = line
    import_compose().complete(arguments, folders)


def _print_beginning_with(word: str, names: Iterable[str]) -> None:
    print("\n".join(name for name in names if name.startswith(word)))
