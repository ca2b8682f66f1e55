"""Features: what becomes of each where names are missing or versions are new."""

import pytest

from equipoise.app.machine.facts import features
from equipoise.app.machine.facts.features import CHECKED, CheckedFeature, list_features
from equipoise.app.machine.facts.packages import Package
from equipoise.interop import adapters, versions
from equipoise.interop.adapters import Adapter, Feature

TESTED = Package(name="numpy", version="2.0", status="tested", remark="")
NEWER = Package(name="numpy", version="9.9", status="newer than tested", remark="")
OLDER = Package(name="numpy", version="1.0", status="older than tested", remark="")


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A feature with a name that it needs, and one that it can do without."""
    needed = Adapter("numpy", ("math.fsum", "math.tau"))
    replaced = Adapter("numpy", ("math.pi",), "it is computed")
    monkeypatch.setattr(features, "all_features", lambda: [Feature("sums", "Sums", (needed, replaced))])
    monkeypatch.setattr(versions, "installed_version", lambda package: "9.9")


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let names be missing."""
    found = adapters.find
    monkeypatch.setattr(adapters, "find", lambda name: None if name in names else found(name))


def checked(*packages: Package) -> tuple[str, str]:
    (feature,) = list_features(packages)
    assert feature == CheckedFeature(key="sums", name="Sums", status=feature.status, remark=feature.remark)
    return feature.status, feature.remark


def test_all_is_well() -> None:
    assert checked(TESTED) == ("checked", CHECKED)


@pytest.mark.parametrize("package", [NEWER, OLDER], ids=["newer", "older"])
def test_another_version(package: Package) -> None:
    assert checked(package) == ("not tested", f"not tested with numpy {package.version}")


def test_a_needed_name_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "math.fsum", "math.pi")
    assert checked(NEWER) == ("refused", "lacks math.fsum of numpy 9.9")


def test_the_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "math.fsum")
    monkeypatch.setattr(versions, "installed_version", lambda package: None)
    assert checked(TESTED) == ("refused", "needs numpy, which is not installed")


def test_a_name_is_missing_that_it_can_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "math.pi")
    assert checked(TESTED) == ("works without", "works without math.pi: it is computed")
    assert checked(NEWER) == (
        "works without",
        "works without math.pi: it is computed; not tested with numpy 9.9",
    )
