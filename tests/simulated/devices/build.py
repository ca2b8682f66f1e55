"""The extension that simulates devices: compiled once for each version of torch and of its own source.

Nothing here imports torch, which looks for CUDA when it is imported, and would not look again.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["MODULE", "NotBuildable", "built_extension"]

MODULE = "simulated_cuda"
_SOURCES = Path(__file__).parent / "extension"
_OPTIONS = ("-O1", "-std=c++20", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={MODULE}")
_LIBRARIES = ("-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python")
_TIMEOUT = 900.0  # seconds


class NotBuildable(Exception):
    """Raised where the machine lacks what the extension needs."""


def built_extension() -> Path:
    """Return the compiled extension, which may have to be compiled first: about a minute.

    Raises:
        NotBuildable: If there is no compiler, headers are missing, the cache cannot be written, or torch has CUDA
            itself.
        RuntimeError: If the source cannot be compiled otherwise.
    """
    torch = _folder_of_torch()
    command = [_compiler(), *_OPTIONS, *_paths(torch), *_LIBRARIES]
    folder = _cache_folder() / f"torch-{importlib.metadata.version('torch')}" / _hash(command)
    extension = folder / f"{MODULE}.so"
    if extension.is_file():
        return extension
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotBuildable(f"the cache folder cannot be created: {error}") from error
    with _locked(folder / "lock"):
        # Another process may have compiled it meanwhile.
        if not extension.is_file():
            _compile(command, extension)
    return extension


def _folder_of_torch() -> Path:
    if not sys.platform.startswith("linux"):
        raise NotBuildable("devices are simulated on Linux alone")
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotBuildable("torch is not installed")
    folder = Path(spec.origin).parent
    if any((folder / "lib").glob("libtorch_cuda*")):
        raise NotBuildable("this torch has CUDA itself; devices are simulated with a build for the CPU alone")
    return folder


def _compiler() -> str:
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "c++"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise NotBuildable("there is no C++ compiler (g++, clang++, or $CXX)")


def _paths(torch: Path) -> list[str]:
    """Return the options that name the folders of headers and libraries."""
    python_headers = Path(sysconfig.get_path("include"))
    for header in (torch / "include" / "torch" / "library.h", python_headers / "Python.h"):
        if not header.is_file():
            raise NotBuildable(f"the header {header.name} is missing")
    libraries = torch / "lib"
    return [f"-isystem{torch / 'include'}", f"-isystem{python_headers}", f"-L{libraries}", f"-Wl,-rpath,{libraries}"]


def _cache_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "equipoise-tests" / MODULE


def _hash(command: list[str]) -> str:
    """Return a name that is another one for every other source, command and version of Python."""
    digest = hashlib.sha256("\0".join([*command, sysconfig.get_config_var("SOABI")]).encode())
    for path in sorted(_SOURCES.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(_SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time into a `with` block. The lock of a process that ends is free."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], extension: Path) -> None:
    # Whoever finds the file finds all of it.
    unfinished = extension.with_suffix(".unfinished")
    compiler, *options = command
    source = str(_SOURCES / "module.cpp")
    result = subprocess.run(
        [compiler, source, "-o", str(unfinished), *options],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if result.returncode == 0:
        unfinished.replace(extension)
        return
    if "No such file or directory" in result.stderr:
        raise NotBuildable(f"headers are missing: {result.stderr[:500]}")
    raise RuntimeError(f"The extension that simulates devices cannot be compiled:\n{result.stderr[:5000]}")
