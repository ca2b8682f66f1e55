"""The folders of configurations that a command reads: those that `--config-dir` names, `conf`, or the example's."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import equipoise
from equipoise.errors import ConfigurationError

__all__ = ["starter_folder", "take_folders"]


def take_folders(arguments: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Return the arguments without `--config-dir`, and the folders of configurations, the most important first.

    Raises:
        ConfigurationError: If a flag names no folder, or the present folder is a subfolder of a project.
    """
    # 1. The folders that flags name.
    rest = []
    folders = []
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if flag not in ("--config-dir", "-cd"):
            rest.append(argument)
        else:
            folders.append(_config_folder(value if equals else next(remaining, "")))

    # 2. The folder `conf`, or else that of the example.
    conf = Path("conf").resolve()
    if conf.is_dir() and conf not in folders:
        folders.append(conf)
    if not folders:
        _refuse_subfolder(conf.parent)
        folders.append(starter_folder() / "conf")
    return rest, folders


def starter_folder() -> Path:
    """Return the folder of the digits example: in the package if it is installed, beside it in a checkout."""
    package = Path(equipoise.__file__).parent
    installed = package / "starter"
    if installed.is_dir():
        return installed.resolve()
    return (package.parent / "examples" / "digits").resolve()


def _config_folder(name: str) -> Path:
    # `Path("")` would be the present folder.
    if not name:
        raise ConfigurationError("--config-dir must be followed by a folder of configurations.")
    folder = Path(name)
    if not folder.is_dir():
        raise ConfigurationError(f"--config-dir must name a folder of configurations, but there is no folder {name!r}.")
    return folder.resolve()


def _refuse_subfolder(folder: Path) -> None:
    """Refuse to run the example in a subfolder of a project.

    Raises:
        ConfigurationError: If a folder above this one has a `conf` with a configuration of Equipoise.
    """
    for parent in folder.parents:
        conf = parent / "conf"
        # Folders above this one may belong to somebody else, or hold any file of this name.
        is_project = False
        with contextlib.suppress(OSError, UnicodeDecodeError):
            is_project = "equipoise" in (conf / "config.yaml").read_text(encoding="utf-8")
        if is_project:
            raise ConfigurationError(
                f"There is no folder conf here, but there is {str(conf)!r}: this is a subfolder of a project. Run the"
                f" command there, after `cd {os.path.relpath(parent, folder)}`, or add"
                f" `--config-dir {os.path.relpath(conf, folder)}`."
            )
