"""Sections of the report that other packages add: what is drawn, and what a wrong one disturbs."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import equipoise
from equipoise import RunReport
from equipoise.extensions.report.added_sections import added_sections
from equipoise.names import extensions
from tests.support.callback_runs import Small, loader, trainer

Install = Callable[[str, str], None]
IMPORT = "from equipoise.extensions.report import ReportSection\n"
GOOD = (
    "def section(trainer, module):\n    return ReportSection('Weather & wind', 'a < b', [('', 'Degrees'), ('x', 21)])"
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package that adds a section: its metadata, and a module of its name with the given code."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def install_package(package: str, code: str) -> None:
        metadata = site / f"{package}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[equipoise.report_sections]\n{package} = {package}:section\n")
        (site / f"{package}.py").write_text(IMPORT + code)
        extensions._points.cache_clear()
        monkeypatch.delitem(sys.modules, package, raising=False)

    yield install_package
    extensions._points.cache_clear()


def report(folder: Path) -> str:
    run = trainer(equipoise.Trainer, callbacks=[RunReport()], max_epochs=1, default_root_dir=folder)
    run.fit(Small(), loader(4))
    return (folder / "report.html").read_text(encoding="utf-8")


def test_it_is_drawn_as_text(install: Install, tmp_path: Path) -> None:
    install("weather", GOOD)
    page = report(tmp_path)
    assert "<h2>Weather &amp; wind</h2><p>a &lt; b</p>" in page
    assert '<th scope="col" class="number">Degrees</th>' in page
    assert '<td>x</td><td class="number">21</td>' in page


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import a_missing_package", "the package broken offers broken:section, which fails with ModuleNotFoundError"),
        ("def section(trainer, module):\n    return 1 / 0", "ZeroDivisionError: division by zero"),
        ("def section(trainer, module):\n    return 'text'", "must return .*ReportSection or None, not 'text'"),
        (
            "def section(trainer, module):\n    return ReportSection('T', table=[('a',), ('b', 'c')])",
            r"All rows .*1, 2",
        ),
        ("def section(trainer, module):\n    return ReportSection('T', table=3)", "'int' object is not iterable"),
    ],
)
def test_one_that_fails_is_a_warning(install: Install, tmp_path: Path, code: str, message: str) -> None:
    install("broken", code)
    install("weather", GOOD)
    with pytest.warns(UserWarning, match=f"The report lacks the section 'broken': .*{message}") as caught:
        page = report(tmp_path)
    assert len([warning for warning in caught if "The report lacks" in str(warning.message)]) == 1
    assert "<h2>Weather &amp; wind</h2>" in page
    assert ": finished</title>" in page


def test_none_is_no_section(install: Install) -> None:
    install("silent", "def section(trainer, module):\n    return None")
    assert added_sections(trainer(equipoise.Trainer), None) == []
