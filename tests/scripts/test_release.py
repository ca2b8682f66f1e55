"""The checks of a release: this checkout passes them, and each fault is found."""

import zipfile
from pathlib import Path

import pytest

from scripts.checks.archives import wheel_faults
from scripts.checks.metadata import metadata_faults
from scripts.checks.sources import ROOT, changelog_faults, changelog_notes, version_faults, version_of
from scripts.release import build, faults_of

METADATA = """Metadata-Version: 2.4
Name: equipoise
Version: 1.2.3
Summary: A trainer.
License-Expression: Apache-2.0
License-File: LICENSE
Classifier: Programming Language :: Python :: 3
Keywords: pytorch
Requires-Python: >=3.11
Description-Content-Type: text/markdown

# Title

See [a page](https://example.org/page.md), [another](https://example.org), [below](#title).
"""
ENTRY_POINTS = "[console_scripts]\nequipoise = equipoise.__main__:main\n"
TRACKED = {"equipoise/__init__.py", "examples/digits/README.md", "tests/test_a.py", "README.md"}
INFORMATION = "equipoise-1.2.3.dist-info"


def wheel_with(folder: Path, metadata: str = METADATA, without: str = "", **more: str) -> Path:
    files = {
        "equipoise/__init__.py": "",
        "equipoise/starter/README.md": "",
        f"{INFORMATION}/METADATA": metadata,
        f"{INFORMATION}/RECORD": "",
        f"{INFORMATION}/entry_points.txt": ENTRY_POINTS,
        f"{INFORMATION}/licenses/LICENSE": "",
        **more,
    }
    path = folder / "equipoise-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            if name != without:
                archive.writestr(name, content)
    return path


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "equipoise").mkdir()
    (tmp_path / "equipoise" / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.3\n")
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.2.3] - 2026-01-31\n\n### Fixed\n\n- It.\n")
    return tmp_path


def test_this_checkout_states_one_version_and_its_changes() -> None:
    assert version_faults(ROOT) == []
    assert changelog_faults(ROOT, version_of(ROOT)) == []


@pytest.mark.slow
def test_the_archives_of_this_checkout_have_no_fault(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("the checks ask git for the files of the repository")
    assert faults_of(*build(tmp_path / "dist")) == []


def test_another_version_is_found(checkout: Path) -> None:
    assert version_faults(checkout) == []
    (checkout / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.2.2\n")
    (checkout / "pyproject.toml").write_text('[project]\nversion = "1.3"\n')
    assert version_faults(checkout) == [
        "pyproject.toml: version 1.3, not 1.2.3",
        "CITATION.cff: version 1.2.2, not 1.2.3",
    ]


def test_the_form_of_the_changelog(checkout: Path) -> None:
    assert changelog_faults(checkout, "1.2.3") == []
    assert changelog_notes(checkout, "1.2.3") == []
    (checkout / "CHANGELOG.md").write_text(
        "## [Unreleased]\n\n### Breaking\n\n- A.\n\n## 1.2.2\n\n## [1.2.3] - unreleased\n"
    )
    assert changelog_faults(checkout, "1.3.0") == [
        "CHANGELOG.md: no section ## [1.3.0]",
        "CHANGELOG.md: '## 1.2.2' is not of the form '## [VERSION] - DATE'",
        "CHANGELOG.md: 'Breaking' is none of Added, Changed, Deprecated, Fixed, Removed, Security",
    ]
    assert changelog_notes(checkout, "1.2.3") == [
        "CHANGELOG.md: there are entries under [Unreleased]",
        "CHANGELOG.md: the section of 1.2.3 has no date",
    ]


def test_files_of_a_wheel(tmp_path: Path) -> None:
    assert wheel_faults(wheel_with(tmp_path), TRACKED) == []
    more = {"tests/test_a.py": "", "equipoise/__pycache__/a.pyc": ""}
    wheel = wheel_with(tmp_path, without="equipoise/starter/README.md", **more)
    assert [fault.removeprefix(f"{wheel.name}: ") for fault in wheel_faults(wheel, TRACKED)] == [
        "equipoise/starter/README.md is missing",
        "equipoise/__pycache__/a.pyc should not be in it",
        "tests/test_a.py should not be in it",
        "equipoise/__pycache__/a.pyc is left over from a run",
    ]
    wheel = wheel_with(tmp_path, without=f"{INFORMATION}/licenses/LICENSE")
    assert wheel_faults(wheel, TRACKED) == [f"{wheel.name}: licenses/LICENSE is missing"]


@pytest.mark.parametrize(
    ("line", "replacement", "fault"),
    [
        ("Version: 1.2.3", "Version: 1.2.4", "version 1.2.4, not 1.2.3"),
        ("Requires-Python: >=3.11", "Requires-Python: three", "'three' is invalid for 'requires-python'"),
        ("# Title", '<div align="center">', "an index removes the HTML"),
        (
            "(https://example.org/page.md)",
            "(docs/page.md)",
            "the link to docs/page.md leads nowhere on a package index",
        ),
    ],
)
def test_metadata(tmp_path: Path, line: str, replacement: str, fault: str) -> None:
    assert metadata_faults(wheel_with(tmp_path), "1.2.3") == []
    (found,) = metadata_faults(wheel_with(tmp_path, METADATA.replace(line, replacement)), "1.2.3")
    assert fault in found
