"""Extensions of installed packages: found by name, loaded on use, refused in words where a package is wrong."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from equipoise import ConfigurationError, SingleDeviceStrategy
from equipoise.names import extensions
from equipoise.names.extensions import load_extension, names_of_extensions
from tests.support.trainer_runs import refuses, trainer

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package that offers a strategy: its metadata, and a module of its name with the given code."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install_package(package: str, name: str, code: str) -> None:
        metadata = tmp_path / f"{package}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[equipoise.strategies]\n{name} = {package}:Local\n")
        (tmp_path / f"{package}.py").write_text(code)
        extensions._points.cache_clear()
        monkeypatch.delitem(sys.modules, package, raising=False)

    yield install_package
    extensions._points.cache_clear()


STRATEGY = "from equipoise import SingleDeviceStrategy\nclass Local(SingleDeviceStrategy):\n    name = 'local'\n"


def test_a_strategy_of_another_package(install: Install) -> None:
    install("of_others", "local", STRATEGY)
    assert names_of_extensions("strategies")[-1] == "local"
    strategy = trainer(strategy="local").connected_strategy
    assert isinstance(strategy, SingleDeviceStrategy)
    assert strategy.name == "local"


def test_a_broken_package_disturbs_nothing_else(install: Install) -> None:
    install("broken", "local", "import a_package_that_is_missing\n")
    trainer(strategy="dp", devices=2)
    with pytest.raises(ConfigurationError, match=r"'local' .* the package broken .* No module named 'a_package_that"):
        trainer(strategy="local")


def test_two_packages_with_one_name(install: Install) -> None:
    install("first", "local", STRATEGY)
    install("second", "local", STRATEGY)
    assert names_of_extensions("strategies").count("local") == 1
    words = "first (first:Local) and second (second:Local)"
    refuses(lambda: load_extension("strategies", "local"), "two meanings", words)


def test_another_package_does_not_replace_one_of_ours(install: Install) -> None:
    install("replacing", "dp", STRATEGY)
    refuses(lambda: load_extension("strategies", "dp"), "'dp' has two meanings", "equipoise", "and replacing")


def test_an_unknown_name_of_a_strategy_is_refused(install: Install) -> None:
    install("of_others", "local", STRATEGY)
    words = ("strategy must be one of", "'local', not 'locl'.", "Did you mean")
    refuses(lambda: trainer(strategy="locl"), *words)
