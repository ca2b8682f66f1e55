"""Take away from this process what another operating system lacks.

A process of Linux cannot become one of another system. `sys.platform` may say so, names and modules may be missing, and
an audit hook may refuse what the system would refuse. The rest stays, since Python itself would break without it:

- `os.name` and `os.sep`: pathlib chooses its classes by the first, and paths have slashes. So drives, backslashes and
  names that differ in case alone are not tried.
- `os.listxattr` and its like, which shutil uses here.
- torch and all other packages: they are imported before, so what they do on other systems is not tried.
- Processes that this one starts: they run under Linux.
"""

import importlib
import multiprocessing
import os
import platform
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["beginning", "deny_linux_files", "import_packages", "is_called_by", "lack", "pretend_to_be"]

# Packages that Equipoise imports, and those modules of Python that look around when they are imported.
_PACKAGES = (
    *("cloudpickle", "hydra", "lightning.pytorch", "lightning.pytorch.loggers", "omegaconf", "psutil", "rich.console"),
    *("rich.live", "sklearn.datasets", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.tensor", "torch.utils.tensorboard", "torchmetrics.classification"),
    *("concurrent.futures.thread", "ctypes", "multiprocessing.connection", "shutil", "subprocess", "tempfile"),
)
_FILES_OF_LINUX = ("/proc", "/sys", "/dev/shm")
# psutil, which was imported for Linux, and the rules of other files.
_READERS = ("psutil", "tests.platforms.windows_files")
# Functions of the stack among which a caller is looked for.
_DEPTH = 8


def import_packages() -> None:
    """Import the packages that Equipoise uses, while everything is there that they expect under Linux."""
    for name in _PACKAGES:
        importlib.import_module(name)
    # It keeps the answer of `os.uname`.
    platform.uname()


def beginning(module: ModuleType, *beginnings: str, but: Collection[str] = ()) -> list[str]:
    """Return the names of a module that begin in one of some ways, but for some."""
    return [name for name in dir(module) if name.startswith(beginnings) and name not in but]


def lack(names: dict[ModuleType, list[str]], modules: Collection[str], start_methods: Collection[str]) -> None:
    """Remove names from modules, let imports of modules fail, and remove ways in which multiprocessing starts."""
    for module, names_of_module in names.items():
        for name in names_of_module:
            if hasattr(module, name):
                delattr(module, name)
    for name in modules:
        sys.modules[name] = None  # type: ignore[assignment]
    multiprocessing.set_start_method("spawn", force=True)
    for name in start_methods:
        del multiprocessing.context._concrete_contexts[name]  # type: ignore[attr-defined]


def pretend_to_be(name: str, system: str) -> None:
    """Give the names of a system, from now on.

    Args:
        name: That of `sys.platform`.
        system: That of `platform.system`.
    """
    sys.platform = name
    platform.system = lambda: system


def deny_linux_files() -> None:
    """Let files that only Linux has be missing."""

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | Path):
            return
        path = os.fsdecode(arguments[0])
        if path.startswith(_FILES_OF_LINUX) and not is_called_by(_READERS):
            raise FileNotFoundError(2, "No such file or directory", path)

    stat = os.stat

    def stat_of_others(path: Any, **options: Any) -> os.stat_result:
        check("open", (path,))
        return stat(path, **options)

    sys.addaudithook(check)
    # No event of an audit.
    os.stat = stat_of_others


def is_called_by(packages: Collection[str]) -> bool:
    """Tell whether a function of a package is near the top of the stack, below that of an audit hook.

    Args:
        packages: Names of packages.
    """
    frame = sys._getframe(1)
    for _ in range(_DEPTH):
        name = frame.f_globals.get("__name__", "")
        if any(name == package or name.startswith(f"{package}.") for package in packages):
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
