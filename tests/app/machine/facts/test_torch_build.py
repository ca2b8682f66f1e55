"""The build of torch, of this machine and of others."""

from pathlib import Path

import pytest
import torch

from equipoise.app.machine.facts.torch_build import read_torch_build


@pytest.mark.parametrize(("number", "text"), [(91002, "9.10.2"), (8902, "8.9.2"), (None, None)])
def test_a_build_for_cuda(monkeypatch: pytest.MonkeyPatch, number: int | None, text: str | None) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: number)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    build = read_torch_build()
    assert (build["built_for"], build["cudnn"], build["nccl"]) == ("CUDA 12.8", text, "2.27.3")


def test_a_library_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise RuntimeError("cuDNN version incompatibility: see /opt/lib/libcudnn.so")

    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", refuse)
    assert read_torch_build()["cudnn"] == "cuDNN version incompatibility: see ..."


@pytest.mark.parametrize(
    ("module", "name", "value", "built_for"),
    [
        (torch.version, "hip", "6.4", "ROCm 6.4"),
        (torch.backends.mps, "is_built", lambda: True, "MPS"),
        (torch.backends.mps, "is_built", lambda: False, "CPU"),
    ],
    ids=["ROCm", "MPS", "CPU"],
)
def test_builds_for_others(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, value: object, built_for: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(module, name, value)
    assert read_torch_build()["built_for"] == built_for


def test_the_compiler_of_the_environment_or_of_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A command is named without its folder."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", f"{tmp_path / 'my-compiler'} -O2")
    (tmp_path / "my-compiler").touch(mode=0o755)
    build = read_torch_build()
    assert (build["compiler"], build["has_compiler"]) == ("my-compiler", True)
    monkeypatch.delenv("CXX")
    for platform, compiler in (("darwin", "clang++"), ("linux", "g++")):
        monkeypatch.setattr("sys.platform", platform)
        build = read_torch_build()
        assert (build["compiler"], build["has_compiler"]) == (compiler, False)
