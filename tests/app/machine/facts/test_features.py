"""Features: what becomes of each where names are missing or versions are new."""

import pytest

from equipoise.app.machine.facts import features
from equipoise.app.machine.facts.features import CHECKED, list_features
from equipoise.app.machine.facts.packages import Package
from equipoise.interop import adapters, versions
from equipoise.interop.adapters import Adapter, Feature

FALLBACK = "works without math.pi: it is computed"


@pytest.mark.parametrize(
    ("missing", "version", "status", "expected"),
    [
        ((), "9.9", "tested", ("checked", CHECKED)),
        ((), "9.9", "newer than tested", ("not tested", "not tested with numpy 9.9")),
        ((), "1.0", "older than tested", ("not tested", "not tested with numpy 1.0")),
        (("math.fsum", "math.pi"), "9.9", "newer than tested", ("refused", "lacks math.fsum of numpy 9.9")),
        (("math.fsum",), None, "tested", ("refused", "needs numpy, which is not installed")),
        (("math.pi",), "9.9", "tested", ("works without", FALLBACK)),
        (("math.pi",), "9.9", "newer than tested", ("works without", f"{FALLBACK}; not tested with numpy 9.9")),
    ],
)
def test_missing_names_and_other_versions_decide_what_becomes_of_a_feature(
    monkeypatch: pytest.MonkeyPatch,
    missing: tuple[str, ...],
    version: str | None,
    status: str,
    expected: tuple[str, str],
) -> None:
    """The feature has two names that it needs, and one that it can do without."""
    needed = Adapter("numpy", ("math.fsum", "math.tau"))
    replaced = Adapter("numpy", ("math.pi",), "it is computed")
    find = adapters.find
    monkeypatch.setattr(features, "all_features", lambda: [Feature("sums", "Sums", (needed, replaced))])
    monkeypatch.setattr(versions, "installed_version", lambda package: version)
    monkeypatch.setattr(adapters, "find", lambda name: None if name in missing else find(name))
    (feature,) = list_features([Package(name="numpy", version=version, status=status, remark="")])
    assert (feature.key, feature.name) == ("sums", "Sums")
    assert (feature.status, feature.remark) == expected
