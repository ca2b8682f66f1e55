"""The error about a feature for which the installed version of a package lacks something that is needed."""

from collections.abc import Iterable

from equipoise.errors import ConfigurationError
from equipoise.interop.versions import TESTED, installed_version

__all__ = ["refusal"]


def refusal(feature: str, package: str, missing: Iterable[str], remedy: str = "") -> ConfigurationError:
    """Return the error that names a feature, the installed version of a package, and what is to be done.

    Args:
        feature: The feature, in the user's words.
        package: The package, as pip knows it.
        missing: Names that the package lacks; those that are found by behaviour are described in words.
        remedy: A way without the feature, as a sentence. Default: none.

    Example:
        >>> str(refusal("LearningRateFinder", "lightning", ["_min_lr"])).split(" with")[0]
        'LearningRateFinder does not work'
    """
    oldest, newest = TESTED[package]
    text = (
        f"{feature} does not work with {package} {installed_version(package)}, which lacks {', '.join(missing)}."
        f" It was tested with {package} {oldest} to {newest}: pip install '{package}>={oldest},<={newest}'."
    )
    if remedy:
        text = f"{text} Or: {remedy}"
    return ConfigurationError(text)
