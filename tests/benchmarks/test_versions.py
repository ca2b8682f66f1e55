"""The matrix of versions: its rows are those that are promised, and a row that fails or cannot be built is named."""

import re
import stat
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

pytest.importorskip("uv")

from benchmarks.versions import __main__ as matrix
from benchmarks.versions import environments
from benchmarks.versions.rows import OLDEST, ROWS, Row
from equipoise.interop.versions import TESTED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TESTS = """
import pytest

def test_that_passes(): pass
def test_that_fails(): assert False
@pytest.mark.thorough
def test_that_takes_a_second(): pass
"""


def versions_of(package: str) -> list[tuple[int, ...]]:
    """Return the versions of a package in the rows, in ascending order."""
    versions = {row.packages[package] for row in ROWS if package in row.packages}
    return sorted(tuple(map(int, version.split("."))) for version in versions)


def test_the_rows_reach_from_the_oldest_to_the_newest_tested_version() -> None:
    oldest, *_, newest = [".".join(map(str, version)) for version in versions_of("torch")]
    assert (oldest, newest) == TESTED["torch"]
    pythons = sorted({row.python for row in ROWS}, key=lambda version: int(version.split(".")[1]))
    assert (pythons[0], pythons[-1]) == TESTED["python"]


def test_the_oldest_row_has_the_lower_bounds() -> None:
    bounds = dict(re.fullmatch(r"([a-z-]+)>=([0-9.]+)(?:,<.*)?", text).groups() for text in PROJECT["dependencies"])
    assert set(bounds) == {"torch", *OLDEST}
    row = next(row for row in ROWS if row.name == "oldest")
    for package, bound in bounds.items():
        assert Version(row.packages[package]) == Version(bound), package
        if package in TESTED:
            assert TESTED[package][0] == row.packages[package]


def test_the_pinned_versions_are_the_newest_tested_ones() -> None:
    """But for torch, whose pinned version is one of the rows: simulated devices are developed with it."""
    pinned = dict(re.findall(r"^([a-z0-9-]+)==([0-9.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for package, (_, newest) in TESTED.items():
        if package not in ("python", "torch"):
            assert pinned[package] == newest, package
    assert pinned["torch"] in [row.packages.get("torch") for row in ROWS]


def test_the_classifiers_name_the_pythons_of_the_rows() -> None:
    prefix = "Programming Language :: Python :: 3."
    named = {text.removeprefix(prefix) for text in PROJECT["classifiers"] if text.startswith(prefix)}
    assert named == {row.python.removeprefix("3.") for row in ROWS}


def test_the_forge_runs_the_same_rows() -> None:
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
    named = re.findall(r"^ {10}- (\S+)$", workflow, re.MULTILINE)
    assert named == [row.name for row in ROWS if row.name != "newest"]


def wrapped_environment(folder: Path, row: Row) -> None:
    """Write an environment that looks built and runs this interpreter."""
    binaries = folder / row.name / "bin"
    binaries.mkdir(parents=True)
    (folder / row.name / "built_from.txt").write_text(environments._wanted(row) + environments.PROJECT.read_text())
    for name, line in {"python": f'exec {sys.executable} "$@"', "equipoise": "exit 3"}.items():
        script = binaries / name
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)


@pytest.mark.slow
def test_what_fails_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = ROWS[0]
    wrapped_environment(tmp_path / "all", row)
    (tmp_path / "test_sample.py").write_text(TESTS)
    arguments = [row.name, "--environments", str(tmp_path / "all"), "--processes", "0", "--tests", str(tmp_path)]
    assert matrix.main([*arguments, "--quick"]) == 1
    out = capsys.readouterr().out
    assert "test_sample.py::test_that_fails failed: assert False" in out
    assert "fsdp failed, see" in out
    assert out.endswith(f"versions: 1 passed, {1 + len(matrix.FEATURES)} failed, 0 skipped\n")


def test_an_environment_that_cannot_be_had_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(arguments: list[str], python: str) -> None:
        raise environments.NotAvailable("nothing answers")

    monkeypatch.setattr(environments, "_uv", refuse)
    assert matrix.main(["py3.12-torch2.11.0", "--environments", str(tmp_path)]) == 0
    *_, reason, _ = capsys.readouterr().out.splitlines()
    assert reason == "not run: py3.12-torch2.11.0 could not be installed: nothing answers"
