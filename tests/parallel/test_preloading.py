"""Workers find what the server has imported, and the server has asked no device and started no thread."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from equipoise.parallel import preloading
from equipoise.parallel.preloading import preload, preloaded_modules


def test_modules_are_registered_once_after_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preloading, "_registered", [])
    preload("json", "csv")
    preload("csv", "math")
    assert preloaded_modules()[-3:] == ["json", "csv", "math"]
    assert preloaded_modules()[0] == "torch"


def run(script: str, folder: Path) -> Any:
    """Runs a script in a fresh interpreter; returns what it prints, as JSON."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


IN_A_WORKER = """
import gc, json, sys
from multiprocessing import forkserver, set_forkserver_preload
from equipoise import DDPStrategy, PipelineStrategy, Trainer
from equipoise.parallel.launch import launch
from equipoise.parallel.preloading import preload

preload("tabnanny", "a_module_that_is_not_there")
set_forkserver_preload(["__main__", "pyclbr", "torch"])
assert not {"tabnanny", "pyclbr"} & set(sys.modules)

def what_a_worker_finds(rank):
    return list(sys.modules), gc.get_freeze_count()

modules, frozen = launch(what_a_worker_finds, 1)
assert frozen > 10_000
assert forkserver._forkserver._preload_modules == ["__main__", "pyclbr", "torch"]
json.dump(modules, sys.stdout)
"""


@pytest.mark.slow
def test_a_worker_finds_what_was_registered(tmp_path: Path) -> None:
    """The trainer and its strategies register themselves; what cannot be imported is passed over.

    Modules that the user gave multiprocessing are there as well.
    """
    modules = run(IN_A_WORKER, tmp_path)
    assert "tabnanny" in modules
    assert "pyclbr" in modules
    assert "equipoise.trainer.trainer" in modules
    assert "equipoise.strategies.ddp" in modules
    assert "equipoise.strategies.pipeline" in modules
    assert "lightning.pytorch" in modules
    assert "torchmetrics.classification" in modules
    assert "equipoise.app" not in modules


IMPORTING = """
import json, sys, threading, warnings
import torch

calls = []

def recorded(module, name):
    function = getattr(module, name, None)
    def record(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)
    if function is not None:
        setattr(module, name, record)

for name in ("_lazy_init", "current_device", "device_count", "init", "is_available"):
    recorded(torch.cuda, name)
for name in ("_cuda_getDeviceCount", "_cuda_init"):
    recorded(torch._C, name)

from equipoise import DDPStrategy, PipelineStrategy, Trainer
from equipoise.parallel.preloading import preloaded_modules
for name in preloaded_modules():
    __import__(name)
threads = [thread.name for thread in threading.enumerate()]
json.dump({"calls": calls, "threads": threads, "initialized": torch.cuda.is_initialized()}, sys.stdout)
"""


@pytest.mark.slow
def test_imports_ask_no_device_and_start_no_thread(tmp_path: Path) -> None:
    """A fork of a process that has done so cannot use CUDA, or hangs."""
    assert run(IMPORTING, tmp_path) == {"calls": [], "threads": ["MainThread"], "initialized": False}
