"""Packages: compared with the tested versions, or only listed."""

from importlib import metadata

import pytest

from equipoise.app.machine.facts.packages import Package, list_packages
from equipoise.interop import versions


def listed(name: str) -> Package:
    (package,) = [package for package in list_packages() if package.name == name]
    return package


@pytest.mark.parametrize(
    ("installed", "status", "remark"),
    [
        ("2.13.0+cpu", "tested", "tested 2.11.0 to 2.15.0"),
        ("2.16.0", "newer than tested", "newer than tested (2.11.0 to 2.15.0)"),
        ("2.10.1", "older than tested", "older than tested (2.11.0 to 2.15.0)"),
        ("somebody's own", "tested", "tested 2.11.0 to 2.15.0"),
        (None, "missing", "missing: pip install 'torch>=2.11.0,<=2.15.0'"),
    ],
)
def test_a_compared_package(monkeypatch: pytest.MonkeyPatch, installed: str | None, status: str, remark: str) -> None:
    monkeypatch.setattr(versions, "TESTED", {"torch": ("2.11.0", "2.15.0")})
    monkeypatch.setattr(versions, "installed_version", lambda name: installed)
    assert listed("torch") == Package(name="torch", version=installed, status=status, remark=remark)


def test_packages_that_are_not_compared() -> None:
    assert listed("psutil") == Package(
        name="psutil", version=metadata.version("psutil"), status="installed", remark="installed"
    )


def test_all_packages_are_listed() -> None:
    names = [package.name for package in list_packages()]
    assert names[: len(versions.TESTED)] == list(versions.TESTED)
    assert {"cloudpickle", "psutil", "tensorboard", "transformers", "ray", "accelerate"} <= set(names)
