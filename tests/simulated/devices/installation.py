"""The simulation is installed before torch is imported, which looks for CUDA once."""

import ctypes
import importlib
import importlib.util
import sys
from types import ModuleType

from tests.simulated.devices.build import MODULE, built_extension

__all__ = ["extension", "install", "install_in_workers", "is_installed"]

_loaded: list[ModuleType] = []


def install() -> None:
    """Make torch believe that there are CUDA devices, in this process. A second call has no effect.

    Raises:
        RuntimeError: If torch is imported already.
        NotBuildable: See `built_extension`.
    """
    if _loaded:
        return
    if "torch" in sys.modules:
        raise RuntimeError("Devices cannot be simulated any more: torch is imported already.")
    path = str(built_extension())
    # 1. The extension registers itself in torch's libraries as they are loaded.
    ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    importlib.import_module("torch")

    # 2. Python's names follow: those of the extension, and those of torch that a build for the CPU lacks.
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    _loaded.append(module)
    importlib.import_module("tests.simulated.devices.torch_names").replace_names()


def install_in_workers() -> None:
    """Let the processes that a trainer starts find the devices, too."""
    from equipoise.parallel.workers import preloading

    # Their server imports this first.
    preloading._FIRST = ("tests.simulated.devices.preloaded", *preloading._FIRST)  # type: ignore[assignment]


def is_installed() -> bool:
    """Return True if this process has simulated devices."""
    return bool(_loaded)


def extension() -> ModuleType:
    """Return the extension, whose functions set limits and return counts."""
    (module,) = _loaded
    return module
