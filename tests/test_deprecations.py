"""Deprecated names and arguments go in the version that their warning names."""

import re

import pytest
from packaging.version import Version

import equipoise
from tests.support.sources import FILES


@pytest.mark.whole_package
def test_deprecated_names_that_are_due_have_been_removed() -> None:
    announced = [
        (path.name, version)
        for path in FILES
        for version in re.findall(r"removed in Equipoise (\d[\d.]*\d)", path.read_text(encoding="utf-8"))
    ]
    assert not [name for name, version in announced if Version(version) <= Version(equipoise.__version__)]
