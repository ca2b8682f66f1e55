"""Packages: compared with the tested versions."""

import pytest

from equipoise.app.machine.facts.packages import Package, list_packages
from equipoise.interop import versions


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
    torch = next(package for package in list_packages() if package.name == "torch")
    assert torch == Package(name="torch", version=installed, status=status, remark=remark)
