"""The hooks that type checkers see are those that Lightning has, with the same arguments."""

import inspect
import runpy
from pathlib import Path

import lightning.pytorch as L
import pytest

import equipoise
from equipoise.callbacks import callback

# A stub file, which Python does not import, is nevertheless a program.
STUB = Path(callback.__file__).with_name("declared_hooks.pyi")
DeclaredHooks = runpy.run_path(str(STUB))["DeclaredHooks"]
HOOKS = [name for name in vars(L.Callback) if name.startswith("on_") or name in ("setup", "teardown")]


@pytest.mark.parametrize("name", HOOKS)
def test_each_of_lightnings_hooks_is_declared(name: str) -> None:
    declared, lightnings = (inspect.signature(getattr(owner, name)).parameters for owner in (DeclaredHooks, L.Callback))
    assert list(declared) == list(lightnings)
    assert [each.default for each in declared.values()] == [each.default for each in lightnings.values()]


def test_no_other_hook_is_declared() -> None:
    assert [name for name in vars(DeclaredHooks) if not name.startswith("__")] == HOOKS


def test_a_callback_is_lightnings_when_it_runs() -> None:
    assert issubclass(equipoise.Callback, L.Callback)
    assert DeclaredHooks not in equipoise.Callback.__mro__
