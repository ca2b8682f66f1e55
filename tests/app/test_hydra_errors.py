"""Messages for errors of Hydra."""

from equipoise.app.hydra_errors import explain


def test_an_error_that_is_among_its_own_causes():
    first, second = ValueError("first"), KeyError("second")
    first.__cause__ = second
    second.__context__ = first
    assert "first" in explain(first)
