"""The garbage collector pauses during imports, and does not look through what they have created."""

import gc
import sys
from types import ModuleType

import pytest

from equipoise.names.imports import collector_paused


class Created:
    pass


def import_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imported_meanwhile", ModuleType("imported_meanwhile"))


@pytest.mark.usefixtures("full_collections")
def test_what_was_created_meanwhile_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector_paused():
        assert not gc.isenabled()
        import_something(monkeypatch)
        created = Created()
    assert gc.isenabled()
    assert any(existing is created for existing in gc.get_objects(generation=2))


@pytest.mark.usefixtures("full_collections")
def test_objects_that_were_set_aside_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    created = Created()
    gc.freeze()
    try:
        with collector_paused():
            import_something(monkeypatch)
        # Their number would not do: other threads may free some of them meanwhile.
        assert gc.get_freeze_count() > 0
        assert not any(existing is created for existing in gc.get_objects())
    finally:
        gc.unfreeze()


def test_a_program_without_collections_stays_so() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
