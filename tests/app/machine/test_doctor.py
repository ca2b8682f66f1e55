"""`equipoise doctor`: as text and as JSON, on machines with and without what it looks for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise import __version__
from equipoise.app.machine import doctor
from equipoise.app.machine.facts import device_list
from equipoise.app.machine.facts.device_list import Devices
from equipoise.app.machine.facts.features import all_features
from equipoise.interop import adapters, versions
from equipoise.memory.devices import DeviceInfo

# Some builds name CUDA in one of two places alone.
TORCH = str(versions.installed_version("torch"))

ROOT = Path(__file__).parents[3]


def test_the_text(equipoise) -> None:
    code, out, err = equipoise("doctor")
    assert (code, err) == (0, "")
    for text in (__version__, TORCH, "start methods", "Devices", "cpu", "open files", "/dev/shm"):
        assert text in out
    for package in versions.TESTED:
        assert package in out
    for feature in all_features():
        assert feature.name in out


def test_the_json_without_what_packages_print(equipoise, monkeypatch: pytest.MonkeyPatch) -> None:
    find = adapters.find

    def print_and_find(name: str) -> Any:
        print("welcome")
        return find(name)

    monkeypatch.setattr(adapters, "find", print_and_find)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO" * 100)
    code, out, err = equipoise("doctor", "--json")
    assert code == 0
    assert "welcome" in err
    facts = json.loads(out)
    assert facts["system"]["equipoise"] == __version__
    assert {package["name"] for package in facts["packages"]} >= versions.TESTED.keys()
    assert facts["torch"]["version"] == torch.__version__
    assert facts["devices"]["devices"][0]["device"] == "cpu"
    assert {feature["key"] for feature in facts["features"]} == {feature.key for feature in all_features()}
    assert facts["limits"].keys() == {"open_files", "most_open_files", "shared_memory", "free_shared_memory"}
    assert facts["environment"]["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert facts["environment"]["NCCL_DEBUG"] == "INFO" * 50
    assert facts["failures"] == {}


def test_other_arguments_are_refused(equipoise) -> None:
    code, out, err = equipoise("doctor", "--jsn")
    assert (code, out) == (2, "")
    assert "equipoise doctor takes no argument '--jsn'; did you mean '--json'?" in err


def test_packages_that_are_missing_untested_or_lack_names(equipoise, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features that need a name are refused, those that have another way use that."""
    installed = versions.installed_version
    absent = ("lightning", "ray", "psutil")
    monkeypatch.setattr(versions, "installed_version", lambda name: None if name in absent else installed(name))
    monkeypatch.setattr(versions, "TESTED", {**versions.TESTED, "torch": ("1.0", "1.1")})
    monkeypatch.setattr(adapters, "find", lambda name: None)
    code, out, _ = equipoise("doctor")
    assert code == 0
    for text in (
        "missing: pip install 'lightning>=",
        "missing: pip install psutil",
        "not installed (needed for runs and sweeps under Ray)",
        "newer than tested (1.0 to 1.1)",
        f"not tested with torch {TORCH}",
        "works without",
        "refused: lacks",
    ):
        assert text in out
    assert max(map(len, out.splitlines())) <= 80


def devices_of_a_large_machine() -> Devices:
    cpu = DeviceInfo(device="cpu", name="A processor " * 8, memory_total=2**40, memory_free=2**39, cores=256)
    gpu = DeviceInfo(
        device="cuda:0",
        name="NVIDIA H100 80GB HBM3",
        index=0,
        physical=0,
        memory_total=80 * 2**30,
        memory_free=None,
        compute_capability=(9, 0),
        cores=132,
    )
    return Devices(devices=[cpu, gpu], driver="570.86.15", failure=None)


def test_a_machine_with_gpus(equipoise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_list, "read_devices", devices_of_a_large_machine)
    monkeypatch.setenv("TORCH_LOGS", "+a,b" * 100)
    code, out, _ = equipoise("doctor")
    assert code == 0
    assert "  cuda:0  NVIDIA H100 80GB HBM3, 80.0 GiB, compute capability 9.0\n" in out
    assert "  driver  570.86.15\n" in out
    assert "256 cores, 1.0 TiB, 512.0 GiB free" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_what_cannot_be_read_does_not_keep_the_rest_away(equipoise, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("no such thing in /home/somebody")

    for name in ("read_torch_build", "list_features", "read_limits"):
        monkeypatch.setattr(doctor, name, fail)
    monkeypatch.setattr(device_list, "read_devices", fail)
    code, out, _ = equipoise("doctor")
    assert code == 0
    assert "Packages" in out
    assert "devices   RuntimeError: no such thing in ..." in out
    assert "features  RuntimeError: no such thing in ..." in out
    code, out, _ = equipoise("doctor", "--json")
    facts = json.loads(out)
    assert facts["torch"] is None
    assert facts["failures"].keys() == {"torch", "devices", "features", "limits"}


def test_nothing_private_is_printed(equipoise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("USER", "somebody")
    monkeypatch.setenv("TORCH_HOME", "/home/somebody/models")
    monkeypatch.setenv("CXX", "/home/somebody/bin/g++")
    monkeypatch.setenv("WANDB_API_KEY", "a-secret")
    for arguments in ((), ("--json",)):
        _, out, _ = equipoise("doctor", *arguments)
        assert "TORCH_HOME" in out
        for text in ("somebody", "a-secret", "WANDB", str(ROOT), sys.prefix):
            assert text not in out


# An interpreter in which little more than torch is installed.
BARE = """
import sys
from importlib import metadata

ABSENT = {"cloudpickle", "hydra", "lightning", "lightning_fabric", "omegaconf", "psutil", "pytorch_lightning", "rich"}
ABSENT |= {"torchmetrics"}
PACKAGES = {*ABSENT, "hydra-core"}


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def version(name, installed=metadata.version):
    if name in PACKAGES:
        raise metadata.PackageNotFoundError(name)
    return installed(name)


sys.meta_path.insert(0, Absent())
metadata.version = version

from equipoise.__main__ import main

sys.exit(main(["doctor"]))
"""


@pytest.mark.slow
def test_a_bare_interpreter(tmp_path: Path) -> None:
    """Neither Lightning nor Hydra nor psutil are there; the text goes to a pipe."""
    script = tmp_path / "program.py"
    script.write_text(BARE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for package in ("lightning", "hydra-core", "rich"):
        assert f"missing: pip install '{package}>=" in done.stdout
    assert "devices  ModuleNotFoundError: No module named 'psutil'" in done.stdout
    assert "open files" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
