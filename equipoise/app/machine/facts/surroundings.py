"""The system: Python, how processes are started, limits, and variables of the environment that change a run."""

import multiprocessing
import os
import platform
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equipoise
from equipoise.app.machine.facts.privacy import is_private

resource: Any = None
# Windows has no such limits.
with suppress(ImportError):
    import resource

__all__ = ["Limits", "System", "read_environment", "read_limits", "read_system"]

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "SLURM_JOB_ID")
_PREFIXES = ("NCCL_", "TORCH_")
# Characters of a value.
_LONGEST = 200
# Workers of loaders send their batches through it.
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class System:
    """Versions of Equipoise, Python and the operating system.

    Attributes:
        equipoise: Version of Equipoise.
        python: Version of Python.
        implementation: Implementation of Python, such as "CPython".
        os: Operating system and its release.
        machine: Kind of processor, such as "x86_64".
        libc: C library; empty if unknown.
        start_methods: Ways in which multiprocessing starts processes here, the default first.
    """

    equipoise: str
    python: str
    implementation: str
    os: str
    machine: str
    libc: str
    start_methods: list[str]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that runs with many processes meet.

    Attributes:
        open_files: Files that a process may open; None: no limit, as on Windows.
        most_open_files: The value to which a process may raise that limit; None: no limit.
        shared_memory: Size of `/dev/shm`, through which loaders send batches, in bytes; None if there is none.
        free_shared_memory: The free part of it, in bytes.
    """

    open_files: int | None
    most_open_files: int | None
    shared_memory: int | None
    free_shared_memory: int | None


def read_system() -> System:
    """Read the versions of Equipoise, Python and the operating system.

    Example:
        >>> read_system().python == platform.python_version()
        True
    """
    return System(
        equipoise=equipoise.__version__,
        python=platform.python_version(),
        implementation=platform.python_implementation(),
        os=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        libc=" ".join(platform.libc_ver()).strip(),
        start_methods=multiprocessing.get_all_start_methods(),
    )


def read_limits() -> Limits:
    """Read the limits of this process.

    Example:
        >>> read_limits().open_files != 0
        True
    """
    soft = None
    hard = None
    if resource is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    size = None
    free = None
    if _SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(_SHARED_MEMORY)
        size = usage.total
        free = usage.free
    return Limits(
        open_files=_finite(soft),
        most_open_files=_finite(hard),
        shared_memory=size,
        free_shared_memory=free,
    )


def _finite(limit: int | None) -> int | None:
    if limit is None or limit == resource.RLIM_INFINITY:
        return None
    return limit


def read_environment() -> dict[str, str]:
    """Return the variables that change how torch and a run work; a value that may be private is hidden.

    Example:
        >>> "HOME" in read_environment()
        False
    """
    variables = {}
    for name in sorted(os.environ):
        if name not in _VARIABLES and not name.startswith(_PREFIXES):
            continue
        value = os.environ[name]
        # That it is set may be reason enough.
        if is_private(name, value):
            value = "(set; the value is not shown)"
        variables[name] = value[:_LONGEST]
    return variables
