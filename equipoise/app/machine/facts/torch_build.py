"""The build of torch: for which devices it is, and the libraries that it brings."""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from equipoise.app.machine.facts.privacy import without_paths

__all__ = ["read_torch_build"]


def read_torch_build() -> dict[str, Any]:
    """Return how torch was built, without asking for a device.

    These are its version, the kind of devices, the versions of cuDNN and NCCL (or MIOpen and RCCL; None without),
    whether processes can communicate through gloo, the C++ compiler that `torch.compile` calls on a CPU, and whether it
    is found.

    Example:
        >>> read_torch_build()["version"] == torch.__version__
        True
    """
    built_for = "CPU"
    if torch.version.cuda is not None:
        built_for = f"CUDA {torch.version.cuda}"
    elif torch.version.hip is not None:
        built_for = f"ROCm {torch.version.hip}"
    elif torch.backends.mps.is_built():
        built_for = "MPS"
    # Other functions of `torch.distributed` exist only where it is available.
    distributed = torch.distributed
    has_groups = distributed.is_available()
    compiler = _compiler()
    return {
        "version": torch.__version__,
        "built_for": built_for,
        "cudnn": _cudnn_version(),
        "nccl": _nccl_version() if has_groups and distributed.is_nccl_available() else None,
        "gloo": has_groups and distributed.is_gloo_available(),
        # A path to it may lie in a user's home.
        "compiler": Path(compiler).name,
        "has_compiler": shutil.which(compiler) is not None,
    }


def _compiler() -> str:
    """Return the compiler's command, without options."""
    command = shlex.split(os.environ.get("CXX", ""))
    if command:
        return command[0]
    # As the compiler of torch chooses.
    if sys.platform == "darwin":
        return "clang++"
    return "g++"


def _cudnn_version() -> str | None:
    # Its functions have no types.
    cudnn: Any = torch.backends.cudnn
    if not cudnn.is_available():
        return None
    try:
        number = cudnn.version()
    except RuntimeError as error:
        # Another version of the library is loaded than the build was made for.
        return without_paths(str(error))
    if number is None:
        return None
    # MIOpen counts in another way.
    if torch.version.cuda is None:
        return str(number)
    # 91002 is 9.10.2, and 8902 is 8.9.2.
    thousands = 1000
    if number >= 90_000:
        thousands = 10_000
    major, rest = divmod(number, thousands)
    minor, patch = divmod(rest, 100)
    return f"{major}.{minor}.{patch}"


def _nccl_version() -> str:
    nccl: Any = torch.cuda.nccl
    return ".".join(str(part) for part in nccl.version())
