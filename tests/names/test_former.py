"""Former names of public modules: imports by them find the modules of today."""

import subprocess
import sys
from importlib import import_module

import pytest

from equipoise.names.former import FORMER_NAMES


@pytest.mark.parametrize("former", FORMER_NAMES)
def test_a_former_name_is_the_module_of_today(former: str) -> None:
    module = import_module(FORMER_NAMES[former])
    assert import_module(former) is module
    assert module.__name__ == FORMER_NAMES[former]
    assert module.__spec__ is not None
    assert module.__spec__.name == FORMER_NAMES[former]


def test_names_are_imported_from_it() -> None:
    from equipoise.callbacks.memory_logger import MemoryLogger as Former  # type: ignore[import-not-found]

    from equipoise import MemoryLogger

    assert Former is MemoryLogger


def test_a_package_in_place_of_a_module_offers_its_names() -> None:
    from equipoise import DDPStrategy
    from equipoise.strategies.ddp import DDPStrategy as Former

    assert Former is DDPStrategy


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'equipoise\.callbacks\.memory_loggr'"):
        import_module("equipoise.callbacks.memory_loggr")


@pytest.mark.slow
def test_a_former_name_comes_first() -> None:
    script = (
        "import equipoise.memory.report as former, equipoise.extensions.report.page.page as page; assert former is page"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)
