"""The extension is compiled once; where the machine lacks what it needs, the reason is told."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulated.devices import build
from tests.simulated.devices.build import NotBuildable, built_extension

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="devices are simulated on Linux alone")

MakeCompiler = Callable[[str], Path]


@pytest.fixture
def make_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeCompiler:
    """A function that puts a shell script in the place of the compiler, and returns where it notes its calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_folder_of_torch", lambda: tmp_path)
    header = tmp_path / "include" / "torch" / "library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path))
    (tmp_path / "Python.h").touch()

    def make(script: str) -> Path:
        compiler, calls = tmp_path / "compiler", tmp_path / "calls"
        compiler.write_text(f"#!/bin/sh\necho called >> {calls}\n{script}\n")
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        return calls

    return make


def test_each_source_is_compiled_once(
    make_compiler: MakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = make_compiler('echo compiled > "$3"')
    extension = built_extension()
    assert extension.read_text() == "compiled\n"
    assert extension.is_relative_to(tmp_path / "cache" / "equipoise-tests" / "simulated_cuda")
    assert built_extension() == extension
    assert calls.read_text() == "called\n"
    monkeypatch.setattr(build, "_SOURCES", tmp_path / "include")
    assert built_extension() != extension


def test_a_source_that_cannot_be_compiled_is_an_error(make_compiler: MakeCompiler) -> None:
    make_compiler("echo 'error: expected ;' >&2; exit 1")
    with pytest.raises(RuntimeError, match="cannot be compiled:\nerror: expected ;"):
        built_extension()


def test_missing_headers_and_compilers_are_reasons(
    make_compiler: MakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_compiler("echo 'fatal error: cstdint: No such file or directory' >&2; exit 1")
    with pytest.raises(NotBuildable, match="cstdint"):
        built_extension()
    (tmp_path / "Python.h").unlink()
    with pytest.raises(NotBuildable, match=r"the header Python\.h is missing"):
        built_extension()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path / "include"))
    with pytest.raises(NotBuildable, match=r"there is no C\+\+ compiler"):
        built_extension()


def test_a_build_of_torch_with_cuda_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "lib" / "libtorch_cuda.so").touch()
    spec = build.importlib.util.spec_from_file_location("torch", package / "__init__.py")
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(NotBuildable, match="this torch has CUDA itself"):
        built_extension()
