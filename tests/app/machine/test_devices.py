"""`equipoise devices`: devices listed once, or watched."""

import signal
import subprocess
import sys

import pytest

from equipoise.memory.devices import list_devices


def test_devices_are_listed_with_their_memory(equipoise, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    code, out, _ = equipoise("devices")
    assert code == 0
    for heading in ("device", "index", "physical", "name", "memory", "free", "capability"):
        assert heading in out
    for info in list_devices():
        assert info.device in out
        assert info.name in out
    assert "CUDA_VISIBLE_DEVICES=3" in out


@pytest.mark.slow
def test_devices_are_watched_until_somebody_has_seen_enough() -> None:
    """A pipe gets one table after the other; Ctrl-C ends without an error."""
    command = [sys.executable, "-m", "equipoise", "devices", "--watch=0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        seen = ""
        while seen.count("least free") < 2:
            assert process.stdout is not None
            seen += process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert "GiB" in seen
    assert "%" in seen


@pytest.mark.slow
def test_a_closed_pipe_ends_the_watch() -> None:
    command = [sys.executable, "-m", "equipoise", "devices", "--watch=0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=300) == 141
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--watch=x",), "--watch takes seconds from 0.1 on, such as --watch=2, not x."),
        (("--watch", "0"), "--watch takes seconds from 0.1 on, such as --watch=2, not 0."),
        (("--watch=nan",), "not nan."),
        (("all",), "takes no arguments but --watch; it was given all."),
    ],
)
def test_devices_refuses_what_it_does_not_know(equipoise, arguments, message):
    code, _, err = equipoise("devices", *arguments)
    assert code == 2
    assert message in err
