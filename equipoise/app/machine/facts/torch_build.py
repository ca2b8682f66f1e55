"""The build of torch: for which devices it is, and the libraries that it brings."""

import os
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from equipoise.app.machine.facts.privacy import without_paths

__all__ = ["TorchBuild", "read_torch_build"]


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """Build of torch.

    Attributes:
        version: Torch's version.
        built_for: "CPU", "MPS", or the version of CUDA or ROCm.
        cudnn: Version of cuDNN, or of MIOpen; None if the build has none.
        nccl: Version of NCCL, or of RCCL; None if the build has none.
        gloo: True if processes can communicate through gloo.
        compiler: Name of the C++ compiler that `torch.compile` calls on a CPU.
        has_compiler: True if that compiler is found.
    """

    version: str
    built_for: str
    cudnn: str | None
    nccl: str | None
    gloo: bool
    compiler: str
    has_compiler: bool


def read_torch_build() -> TorchBuild:
    """Read the build, without asking for a device.

    Example:
        >>> read_torch_build().version == torch.__version__
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
    return TorchBuild(
        version=torch.__version__,
        built_for=built_for,
        cudnn=_cudnn_version(),
        nccl=_nccl_version() if has_groups and distributed.is_nccl_available() else None,
        gloo=has_groups and distributed.is_gloo_available(),
        # A path to it may lie in a user's home.
        compiler=Path(compiler).name,
        has_compiler=shutil.which(compiler) is not None,
    )


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
    version = nccl.version()
    return ".".join(str(part) for part in version)
