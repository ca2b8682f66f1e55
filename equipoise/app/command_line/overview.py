"""The help of all commands, which `equipoise --help` prints."""

from equipoise.app.command import added_commands
from equipoise.app.command_line.commands import OWN_COMMANDS
from equipoise.errors import ConfigurationError

__all__ = ["overview"]

_HEAD = "equipoise trains PyTorch models on the devices you have."
_STAGE_LINES = (
    ("equipoise fit [experiment=NAME] [key=value ...]", "train"),
    ("equipoise validate|test|predict [key=value ...]", "evaluate; name a checkpoint by ckpt_path=PATH, best or last"),
)
_CONFIGURATION = """\
Those with key=value read the configuration in ./conf; --config-dir FOLDER names another folder; without either they
run the digits example. Each run writes to a folder of its own, outputs/DATE/TIME.
"""
_FIRST_EXAMPLES = (
    ("equipoise fit --help", "the groups, keys and flags of a run"),
    ("equipoise fit --help KEY", "the type, default and meaning of a key, such as trainer.max_epochs"),
)
_LAST_LINES = (
    ("equipoise --version", "the version"),
    ("--debug", "show the traceback of an error"),
)
# Columns of the first part of a line of the help.
_WIDTH = 50


def overview() -> str:
    """Return the help of all commands."""
    usages = list(_STAGE_LINES)
    examples = list(_FIRST_EXAMPLES)
    for name, command in (*added_commands(), *OWN_COMMANDS.items()):
        if isinstance(command, ConfigurationError):
            # A package adds a command that cannot be loaded; the others work.
            usages.append((f"equipoise {name}", f"is broken: {command}"))
            continue
        usages.append((f"equipoise {name} {command.usage}", command.summary))
        examples += [(f"equipoise {name} {arguments}", meaning) for arguments, meaning in command.examples]
    lines = [_line(usage, meaning) for usage, meaning in usages]
    last_lines = [_line(usage, meaning) for usage, meaning in (*examples, *_LAST_LINES)]
    return "\n".join([_HEAD, "", *lines, "", _CONFIGURATION, *last_lines])


def _line(usage: str, meaning: str) -> str:
    """Return a line of the help; a long usage has its meaning on a line of its own."""
    if len(usage) > _WIDTH:
        return f"  {usage}\n  {'':{_WIDTH}} {meaning}"
    return f"  {usage:{_WIDTH}} {meaning}"
