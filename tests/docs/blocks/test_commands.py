"""Commands on pages are checked as `tests/docs/blocks/commands.py` says."""

from pathlib import Path

import pytest

from equipoise import ConfigurationError
from tests.docs.blocks.commands import Shell
from tests.docs.blocks.shell_words import commands_in


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("A=1 make tset  # quick", "make has no tset"),
        ("pip install '.[exmples]'", "no extra"),
        ("python missing.py", "there is no missing.py"),
        ("equipoise fitt", "there is no command fitt"),
        ("equipoise fit --mulirun module.lr=0.1", "has no flag --mulirun"),
        ("equipoise fit \\\n  module.learning=0.1", "module.learning"),
        ("srun equipoise fit strategy=dpp", "dpp"),
        ("equipoise plan trainer.devices=2x24apples", "apples"),
        ("equipoise compare --strategies=dpp", "dpp"),
        ("cd examples/digits && equipoise fit module.width=8", "module.width"),
    ],
)
def test_what_would_fail_is_found(script: str, message: str, page_folder: Path) -> None:
    shell = Shell(page_folder)
    *before, wrong = commands_in(script)
    for command in before:
        shell.check(command)
    with pytest.raises((AssertionError, ConfigurationError), match=message):
        shell.check(wrong)
