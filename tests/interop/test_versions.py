"""Versions beside those that were tested, and the one notice about newer ones."""

import tomllib
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import parent_process
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from equipoise.interop import versions
from equipoise.interop.versions import TESTED, installed_version, newer_than_tested, warn_of_untested_versions
from tests.support.trainer_runs import Small, loader, trainer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def not_warned_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A process that has warned of no version, to patch."""
    warn_of_untested_versions.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    warn_of_untested_versions.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warn_of_untested_versions()


def install(monkeypatch: pytest.MonkeyPatch, **installed: str | None) -> None:
    """Let packages have other versions than they have."""
    monkeypatch.setattr(versions, "installed_version", lambda package: installed.get(package))


@pytest.mark.parametrize(
    ("package", "version", "is_newer"),
    [
        ("torch", "2.15.0", False),
        ("torch", "2.15.0+cu130", False),
        ("torch", "2.15.1", True),
        ("torch", "2.15.0rc2", False),
        ("torch", "2.16.0.dev20270101+cpu", True),
        ("torch", "somebody's own", False),
        ("python", "3.13.99", False),
        ("python", "3.14.0+", True),
        ("torch", None, False),
    ],
)
def test_a_newer_version_is_named(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str | None, is_newer: bool
) -> None:
    monkeypatch.setattr(versions, "TESTED", {"torch": ("2.11.0", "2.15.0"), "python": ("3.11", "3.13")})
    install(monkeypatch, **{package: version})
    phrases = newer_than_tested()
    assert bool(phrases) == is_newer
    if is_newer:
        oldest, newest = versions.TESTED[package]
        assert phrases == [f"{package} {version} (tested: {oldest} to {newest})"]


def test_versions_are_in_order() -> None:
    for package, (oldest, newest) in TESTED.items():
        assert Version(oldest) <= Version(newest), package


def test_the_oldest_versions_are_those_that_may_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]
    requirements.append(Requirement(f"python{project['requires-python']}"))
    bounds = {}
    for requirement in requirements:
        (lowest,) = [part.version for part in requirement.specifier if part.operator == ">="]
        bounds[requirement.name] = Version(lowest)
    compared = bounds.keys() & TESTED.keys()
    assert {"python", "torch", "lightning", "hydra-core"} <= compared
    assert {name: bounds[name] for name in compared} == {name: Version(TESTED[name][0]) for name in compared}


def warnings_of(call: Callable[[], object]) -> list[warnings.WarningMessage]:
    """Return the warnings about versions that a call causes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [found for found in caught if "tested with" in str(found.message)]


def test_one_notice_names_all_packages(not_warned_yet: pytest.MonkeyPatch) -> None:
    install(not_warned_yet, torch="99.0", numpy="99.1", rich=TESTED["rich"][1])
    (found,) = warnings_of(warn_of_untested_versions)
    message = str(found.message)
    assert message.startswith("Newer than the versions that Equipoise was tested with: torch 99.0 (tested: ")
    assert ", numpy 99.1 (tested: " in message
    assert "rich" not in message
    assert "`equipoise doctor`" in message
    assert warnings_of(warn_of_untested_versions) == []


class Looking(Small):
    """Fails in a process that has begun a run of its own."""

    def on_train_start(self) -> None:
        assert parent_process() is not None
        assert warn_of_untested_versions.cache_info().hits == 0


def test_the_first_fit_of_a_process_warns_at_its_call(not_warned_yet: pytest.MonkeyPatch) -> None:
    not_warned_yet.setattr(versions, "TESTED", {"torch": ("1.0", "1.1")})
    (found,) = warnings_of(lambda: trainer().fit(Small(), loader()))
    assert f"torch {installed_version('torch')} (tested: 1.0 to 1.1)" in str(found.message)
    assert found.filename == __file__
    assert warnings_of(lambda: trainer().fit(Small(), loader())) == []


def test_workers_do_not_repeat_the_notice() -> None:
    """The notice is given before there are any; in a worker, only the import of these tests has asked for it."""
    trainer(devices=2, strategy="ddp").fit(Looking(), loader())
