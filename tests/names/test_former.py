"""Former names of public modules: imports by them find the modules of today, and warn until they are removed."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from packaging.version import Version

import equipoise
from equipoise.names.former import FORMER_NAMES, REMOVALS

PACKAGE = Path(equipoise.__file__).parent


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No former name has been imported yet: an import warns once in a process."""
    for former in FORMER_NAMES:
        monkeypatch.delitem(sys.modules, former, raising=False)


@pytest.mark.whole_package
@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("former", FORMER_NAMES)
def test_a_former_name_is_the_module_of_today(former: str) -> None:
    module = import_module(FORMER_NAMES[former])
    message = rf"^{former} is now {FORMER_NAMES[former]}\. The former name will be removed in Equipoise 0\.3\.$"
    with pytest.warns(FutureWarning, match=message):
        assert import_module(former) is module
    assert import_module(former) is module  # without a second warning
    assert module.__name__ == FORMER_NAMES[former]
    assert module.__spec__ is not None
    assert module.__spec__.name == FORMER_NAMES[former]


@pytest.mark.usefixtures("forgotten")
def test_names_are_imported_from_it() -> None:
    with pytest.warns(FutureWarning, match=r"^equipoise\.callbacks\.memory_logger is now") as caught:
        from equipoise.callbacks.memory_logger import MemoryLogger as Former  # type: ignore[import-not-found]

    assert [warning.filename for warning in caught] == [__file__]

    from equipoise import MemoryLogger

    assert Former is MemoryLogger


def test_a_package_in_place_of_a_module_offers_its_names() -> None:
    from equipoise import DDPStrategy
    from equipoise.strategies.ddp import DDPStrategy as Former

    assert Former is DDPStrategy


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'equipoise\.callbacks\.memory_loggr'"):
        import_module("equipoise.callbacks.memory_loggr")


@pytest.mark.whole_package
def test_what_is_due_has_been_removed() -> None:
    """No name, and no argument of which a warning says so, outlives the version that removes it."""
    due = [version for version in REMOVALS if Version(version) <= Version(equipoise.__version__)]
    assert not due
    announced = [
        (path.name, version)
        for path in PACKAGE.rglob("*.py")
        for version in re.findall(r"removed in Equipoise (\d[\d.]*\d)", path.read_text(encoding="utf-8"))
    ]
    assert ("run_summary.py", "0.3") in announced
    assert not [name for name, version in announced if Version(version) <= Version(equipoise.__version__)]


@pytest.mark.slow
def test_a_former_name_comes_first() -> None:
    script = (
        "import equipoise.memory.report as former, equipoise.extensions.report.page.page as page; assert former is page"
    )
    subprocess.run([sys.executable, "-W", "error", "-W", "ignore::FutureWarning", "-c", script], check=True)
