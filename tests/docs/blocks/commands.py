"""Commands of a page: what can be checked of them without running them.

`equipoise` commands are composed. Targets of make, files and modules of Python, and extras of pip must exist. Other
programs are not looked at.
"""

import contextlib
import re
import subprocess
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.docs.blocks.equipoise_commands import check_equipoise
from tests.docs.blocks.pages import ROOT, Block

__all__ = ["Shell", "check_syntax"]

# Programs that start the program behind them.
_LAUNCHERS = ("torchrun", "srun", "mpirun", "nohup", "time", "exec")


def check_syntax(block: Block) -> None:
    """Let bash read a block without running it."""
    read = subprocess.run(["bash", "-n"], input=block.source, text=True, capture_output=True, check=False)
    assert read.returncode == 0, read.stderr


class Shell:
    """Check commands one after the other, as somebody types them who stands in a folder.

    Args:
        folder: Where the page begins. `cd` leads to folders in it, or from the root of the repository.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def check(self, command: Sequence[str]) -> None:
        """Check a command.

        Raises:
            AssertionError: If something that it names does not exist.
            ConfigurationError: If overrides of `equipoise` are wrong.
        """
        program, *arguments = command
        if program in _LAUNCHERS and "equipoise" in arguments:
            arguments = arguments[arguments.index("equipoise") + 1 :]
            program = "equipoise"
        if program == "equipoise":
            self._check_equipoise(arguments)
        elif program == "make":
            _check_targets(arguments)
        elif program == "pip":
            _check_extras(arguments)
        elif program == "cd" and arguments:
            self.folder = self._find(arguments[0]) or self.folder
        elif re.fullmatch(r"(\S*/)?python[\d.]*", program):
            self._check_python(arguments)

    def _find(self, name: str) -> Path | None:
        """Return a file or folder that is here, or in the repository."""
        for base in (self.folder, ROOT):
            if (base / name).exists():
                return base / name
        return None

    def _check_equipoise(self, arguments: Sequence[str]) -> None:
        folders = [str(self._find(argument) or argument) if "/" in argument else argument for argument in arguments]
        with contextlib.chdir(self.folder):
            check_equipoise(folders)

    def _check_python(self, arguments: Sequence[str]) -> None:
        match arguments:
            case ["-m", "equipoise", *rest]:
                self._check_equipoise(rest)
            case ["-m", module, *_]:
                assert find_spec(module), f"there is no module {module}"
            case [file, *_] if file.endswith(".py"):
                assert self._find(file), f"there is no {file}, neither here nor in the repository"


def _check_targets(arguments: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for argument in arguments:
        if "=" not in argument and not argument.startswith("-"):
            assert re.search(rf"^{re.escape(argument)}:", makefile, flags=re.MULTILINE), f"make has no {argument}"


def _check_extras(arguments: Sequence[str]) -> None:
    """Check `.[name,name]` and `equipoise[name]`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for argument in arguments:
        found = re.fullmatch(r"(?:\.|equipoise)\[([\w,]+)\]", argument)
        if found:
            unknown = set(found[1].split(",")) - project["optional-dependencies"].keys()
            assert not unknown, f"there is no extra {unknown}"
