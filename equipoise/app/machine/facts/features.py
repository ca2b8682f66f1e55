"""Features that use private names of other packages: which of them work with the installed versions."""

from collections.abc import Sequence
from dataclasses import dataclass

from equipoise.app.machine.facts.packages import NEWER, OLDER, Package
from equipoise.interop import adapters, versions
from equipoise.names.extensions import load_extension, names_of_extensions

__all__ = ["CHECKED", "CheckedFeature", "all_features", "list_features"]

# Packages that every feature uses.
_OF_ALL = ("torch", "lightning", "torchmetrics")
CHECKED = "the private names it needs are available in versions that the tests ran with"


@dataclass(frozen=True, kw_only=True)
class CheckedFeature:
    """Feature that uses private names, checked.

    Attributes:
        key: Its key for programs.
        name: Its name for users.
        status: "checked", "works without" (a name is missing that it can do without), "refused" (a name is missing that
            it needs), or "not tested" (all names are available, in another version than the tested ones).
        remark: The reason.
    """

    key: str
    name: str
    status: str
    remark: str


def all_features() -> list[adapters.Feature]:
    """Return the features that use private names: those of the core, then those of extensions."""
    return [*adapters.FEATURES, *(load_extension("features", name) for name in names_of_extensions("features"))]


def list_features(packages: Sequence[Package]) -> list[CheckedFeature]:
    """Check the private names of all features."""
    untested = {
        package.name: f"{package.name} {package.version}" for package in packages if package.status in (NEWER, OLDER)
    }
    features = []
    for feature in all_features():
        status, remark = _check(feature, untested)
        features.append(CheckedFeature(key=feature.key, name=feature.name, status=status, remark=remark))
    return features


def _check(feature: adapters.Feature, untested: dict[str, str]) -> tuple[str, str]:
    """Return the status of a feature and the reason; `untested`: "NAME VERSION" of untested packages, by name."""
    # 1. Names that it cannot do without.
    missing = adapters.missing_names(feature)
    if missing:
        return "refused", _lack(missing, feature)

    # 2. Versions that were not tested. Each package is named once.
    packages = dict.fromkeys(_OF_ALL)
    packages.update((adapter.package, None) for adapter in feature.adapters)
    other_versions = [untested[package] for package in packages if package in untested]
    remarks = []
    if other_versions:
        remarks.append(f"not tested with {', '.join(other_versions)}")

    # 3. Names that it can do without.
    missing = adapters.missing_names(feature, with_fallback=True)
    fallbacks = _fallbacks(missing, feature)
    if fallbacks:
        return "works without", "; ".join([*fallbacks, *remarks])
    if remarks:
        return "not tested", remarks[0]
    return "checked", CHECKED


def _lack(missing: Sequence[str], feature: adapters.Feature) -> str:
    """Return a phrase about names that a feature cannot do without."""
    package = next(adapter.package for adapter in feature.adapters if missing[0] in adapter.names)
    version = versions.installed_version(package)
    if version is None:
        return f"needs {package}, which is not installed"
    return f"lacks {', '.join(missing)} of {package} {version}"


def _fallbacks(missing: Sequence[str], feature: adapters.Feature) -> list[str]:
    """Return a phrase for each adapter that lacks names: the names, and what happens without them."""
    phrases = []
    for adapter in feature.adapters:
        lacking = [name for name in adapter.names if name in missing]
        if lacking and adapter.fallback:
            phrases.append(f"works without {', '.join(lacking)}: {adapter.fallback}")
    return phrases
