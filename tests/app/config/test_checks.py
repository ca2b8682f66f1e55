"""The checks that run before anything is built."""

import re

import pytest

from equipoise.app.config.checks import check_targets, locate
from equipoise.errors import ConfigurationError


def test_an_error_inside_an_imported_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "explosive_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ZeroDivisionError):
        locate("explosive_module.Thing", "module")


class Taker:
    def __init__(self, a, b=1, *, c): ...


def greedy(a, **rest): ...


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("Taker", {"a": 1, "c": 1}, None),
        ("Taker", {"a": 1, "b": 1, "c": 1}, None),
        ("Taker", {"_args_": [1], "c": 1}, None),
        ("Taker", {"_partial_": True}, None),
        ("Taker", {"_partial_": True, "d": 1}, "x.d is not an argument of Taker; there are: a, b, c."),
        ("Taker", {"a": 1}, "Taker needs c"),
        ("Taker", {}, "Taker needs a, c"),
        ("greedy", {"a": 1, "anything": 1}, None),
        ("greedy", {"anything": 1}, "greedy needs a"),
    ],
)
def test_arguments(target, arguments, message):
    values = {"_target_": f"{__name__}.{target}", **arguments}
    if message is None:
        check_targets(values, "x")
    else:
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            check_targets(values, "x")


def test_a_builtin_without_a_signature_is_not_checked():
    check_targets({"_target_": "builtins.getattr", "any": 1}, "x")
