"""A refusal names the feature, the version and what is to be done."""

from equipoise import ConfigurationError
from equipoise.interop.refusal import refusal
from equipoise.interop.versions import TESTED, installed_version


def test_what_a_refusal_says() -> None:
    error = refusal("LearningRateFinder", "lightning", ["_min_lr", "_max_lr"], "Set the learning rate by hand.")
    oldest, newest = TESTED["lightning"]
    assert isinstance(error, ConfigurationError)
    assert str(error) == (
        f"LearningRateFinder does not work with lightning {installed_version('lightning')},"
        " which lacks _min_lr, _max_lr."
        f" It was tested with lightning {oldest} to {newest}: pip install 'lightning>={oldest},<={newest}'."
        " Or: Set the learning rate by hand."
    )
    assert "Or" not in str(refusal("Training", "torch", ["_name"]))
