"""Nothing that a bug report must not show."""

import pytest

from equipoise.app.machine.facts.privacy import is_private, without_paths


@pytest.fixture(autouse=True)
def somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")
    monkeypatch.delenv("LOGNAME", raising=False)
    monkeypatch.setenv("HOME", "/home/lovelace")


@pytest.mark.parametrize(
    ("name", "value", "private"),
    [
        ("NCCL_SOCKET_IFNAME", "eth0,ib1", False),
        ("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX", False),
        ("TORCH_HOME", "/scratch/group/models", True),
        ("TORCH_HOME", "C:\\models", True),
        ("TORCH_RUN", "ada-7", True),
        ("TORCH_RUN", "lovelace", True),
        ("TORCH_RUN", "adam", False),
        ("TORCH_HUB_TOKEN", "1234", True),
        ("NCCL_SECRET", "1234", True),
    ],
)
def test_values_of_variables(name: str, value: str, private: bool) -> None:
    assert is_private(name, value) == private


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("cannot import name 'f' from 'g' (/home/ada/g.py)", "cannot import name 'f' from 'g' (...)"),
        ("[Errno 2] No such file: '/srv/data/x'\nmore", "[Errno 2] No such file: '...'"),
        ("of ada: ~/x and b/c", "of ...: ... and b/c"),
    ],
)
def test_messages_of_errors(message: str, shown: str) -> None:
    assert without_paths(message) == shown


def test_a_machine_without_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("USER")
    monkeypatch.delenv("HOME")
    assert without_paths("ada") == "ada"
    monkeypatch.setenv("HOME", "/")
    assert without_paths("ada") == "ada"
