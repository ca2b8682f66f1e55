"""A guard for tests of a pipeline in threads."""

import threading
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Fail if a thread of a run survives it."""
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("equipoise")] == []
