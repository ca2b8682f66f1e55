"""Suggestions for unknown names."""

from hypothesis import given
from hypothesis import strategies as st

from equipoise.app.config.suggestions import did_you_mean


@given(st.lists(st.from_regex(r"[a-z]{3,12}", fullmatch=True), min_size=1, unique=True), st.data())
def test_a_known_name_is_its_own_nearest(names, data):
    name = data.draw(st.sampled_from(names))
    assert did_you_mean(name, names) == f"; did you mean {name!r}?"


def test_private_names_are_not_offered():
    assert did_you_mean("_target", ["_target_", "lr"]) == "; there are: lr."
