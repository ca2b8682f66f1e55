"""The help of all commands, which `equipoise --help` prints, and that of one of them."""

import re
from collections.abc import Mapping

from equipoise.app.command import Command, added_commands
from equipoise.app.command_line.commands import OWN_COMMANDS
from equipoise.errors import ConfigurationError
from equipoise.tables.width import entries, output_width, wrapped

__all__ = ["command_help", "overview"]

_HEAD = "equipoise trains PyTorch models on the devices you have."
_STAGES = {
    "fit": "train",
    "validate|test|predict": "evaluate; name a checkpoint by ckpt_path=PATH, best or last",
}
_CONFIGURATION = (
    "Commands with key=value read the configuration in ./conf; --config-dir FOLDER names another folder; without"
    " either they run the digits example. Each run writes to a folder of its own, outputs/DATE/TIME."
)
_FURTHER = {
    "equipoise fit --help": "the groups, keys and flags of a run",
    "equipoise fit --help KEY": "the type, default and meaning of a key, such as trainer.max_epochs",
    "equipoise COMMAND --help": "the arguments and flags of another command",
    "equipoise --version": "the version",
    "--debug": "show the traceback of an error",
}
_CONFIG_DIR = {"--config-dir FOLDER": "a folder of configurations to look in before ./conf"}


def overview() -> str:
    """Return the help of all commands."""
    commands = dict(_STAGES)
    for name, command in (*added_commands(), *OWN_COMMANDS.items()):
        # A package adds a command that cannot be loaded; the others work.
        if isinstance(command, ConfigurationError):
            commands[name] = f"is broken: {command}"
        else:
            commands[name] = command.summary
    head = f"{_HEAD}\n\nequipoise COMMAND [arguments]"
    return "\n\n".join([head, entries(commands), wrapped(_CONFIGURATION, output_width()), entries(_FURTHER)])


def command_help(name: str, command: Command) -> str:
    """Return the help of one command: its arguments, its flags with their meanings, examples.

    Args:
        name: Its name.
        command: The command.
    """
    width = output_width()
    paragraphs = [
        wrapped(f"equipoise {name} {command.usage}", width),
        wrapped(f"{command.summary[:1].upper()}{command.summary[1:]}.", width),
    ]
    meanings = command.flags
    if not isinstance(meanings, Mapping):
        meanings = dict.fromkeys(meanings, "")
    # A flag that ends with "=" takes a value.
    flags = {re.sub("=$", "=VALUE", flag): meaning for flag, meaning in meanings.items()}
    if command.reads_configuration:
        flags |= _CONFIG_DIR
        paragraphs.append(wrapped("It reads the configuration that `equipoise fit` runs: see `fit --help`.", width))
    if flags:
        paragraphs.append(f"Flags:\n\n{entries(flags)}")
    for arguments, meaning in command.examples:
        paragraphs.append(f"{wrapped(f'equipoise {name} {arguments}', width)}\n{wrapped(meaning, width, '    ')}")
    return "\n\n".join(paragraphs)
