"""Objects between processes: every one arrives, and nothing is read that the run has not written."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise import ConfigurationError, WorkerError
from equipoise.parallel.communication.object_exchange import broadcast_object, gather_objects
from equipoise.parallel.payload import authentication
from equipoise.parallel.payload.authentication import SECRET
from equipoise.parallel.payload.object_bytes import dumps, loads
from tests.support.hostile_objects import Runs
from tests.support.process_groups import in_group


@pytest.fixture(autouse=True)
def no_key() -> Iterator[None]:
    yield
    authentication.use_key(None)


def exchanged(rank: int) -> tuple[Any, ...]:
    """Objects of unequal sizes, one of them nothing."""
    everywhere = gather_objects([torch.full((1000 * rank,), float(rank)), "a" * rank, None])
    own = {"rank": rank}
    sent = broadcast_object(own, 1)
    return [(each[0].sum().item(), each[1]) for each in everywhere], sent, sent is own


def test_every_process_gets_every_object() -> None:
    expected = [(0.0, ""), (1000.0, "a"), (4000.0, "aa")]
    for rank, (everywhere, sent, is_own) in enumerate(in_group(exchanged, processes=3)):
        assert everywhere == expected
        assert sent == {"rank": 1}
        assert is_own == (rank == 1)


def changed_at(message: bytes, position: int) -> bytes:
    """Return a message with another byte at a position; a fixed byte might be the one that is there."""
    changed = bytearray(message)
    changed[position] ^= 1
    return bytes(changed)


def test_a_message_of_a_stranger_is_not_read(tmp_path: Path) -> None:
    """It may be cut, changed, or made with another key or without one; and it reads with its own."""
    file = tmp_path / "ran"
    authentication.use_key(None)
    without = dumps(Runs(file))
    authentication.use_key(authentication.new_key())
    other = dumps(Runs(file))
    authentication.use_key(authentication.new_key())
    own = dumps(Runs(file))
    for forged in (without, other, own[:-1], changed_at(own, 40), changed_at(own, 0), b""):
        with pytest.raises(WorkerError, match="not made by this run"):
            loads(forged)
    assert not file.exists()
    loads(own)
    assert file.exists()


def keys(rank: int) -> tuple[bytes, bool]:
    """Return what a process seals, and whether it can open what the first one has sealed with the run's key."""
    return dumps("here"), SECRET in os.environ


def test_launched_processes_have_a_key_of_their_run() -> None:
    (one, in_environment), (other, _) = in_group(keys)
    (another, _), _ = in_group(keys)
    assert one == other != another
    assert not in_environment
    authentication.use_key(authentication.new_key())
    with pytest.raises(WorkerError):
        loads(one)


def test_a_key_is_made_from_a_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    assert authentication.key_of_environment() is None
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(ConfigurationError, match="5 characters, but needs 16"):
        authentication.key_of_environment()
    monkeypatch.setenv(SECRET, "a" * 32)
    key = authentication.key_of_environment()
    assert key is not None
    assert key == authentication.key_of_environment()
    monkeypatch.setenv(SECRET, "b" * 32)
    assert authentication.key_of_environment() != key
