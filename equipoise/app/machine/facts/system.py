"""The system: Python, how processes are started, limits, and variables of the environment that change a run."""

import multiprocessing
import os
import platform
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import equipoise
from equipoise.app.machine.facts.privacy import is_private

resource: Any = None
# Windows has no such limits.
with suppress(ImportError):
    import resource

__all__ = ["read_environment", "read_limits", "read_system"]

_VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "SLURM_JOB_ID")
_PREFIXES = ("NCCL_", "TORCH_")
# Characters of a value.
_LONGEST = 200
# Workers of loaders send their batches through it.
_SHARED_MEMORY = Path("/dev/shm")


def read_system() -> dict[str, Any]:
    """Return the versions of Equipoise, Python and the operating system.

    The C library is empty if it is unknown. Of the ways in which multiprocessing starts processes, the default is
    first.

    Example:
        >>> read_system()["python"] == platform.python_version()
        True
    """
    return {
        "equipoise": equipoise.__version__,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "os": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()).strip(),
        "start_methods": multiprocessing.get_all_start_methods(),
    }


def read_limits() -> dict[str, int | None]:
    """Return the limits that runs with many processes meet.

    These are the number of files that this process may open, the number to which it may raise that limit, and the bytes
    of `/dev/shm`, through which loaders send batches, and of its free part. None: no limit, or no such folder.

    Example:
        >>> read_limits()["open_files"] != 0
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
    return {
        "open_files": _finite(soft),
        "most_open_files": _finite(hard),
        "shared_memory": size,
        "free_shared_memory": free,
    }


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
