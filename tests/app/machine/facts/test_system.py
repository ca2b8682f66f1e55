"""Limits, and the variables that are shown."""

import os
import resource
from pathlib import Path

import pytest

from equipoise.app.machine.facts import system
from equipoise.app.machine.facts.system import read_environment, read_limits


def test_only_variables_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("NCCL_", "TORCH_", "CUDA_", "OMP_", "PYTORCH_", "SLURM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    monkeypatch.setenv("TORCH_HOME", "/home/somebody/torch")
    monkeypatch.setenv("TORCH_LOGS", "x" * 1000)
    monkeypatch.setenv("SLURM_JOB_USER", "somebody")
    monkeypatch.setenv("WANDB_API_KEY", "1234")
    assert read_environment() == {
        "CUDA_VISIBLE_DEVICES": "0,2",
        "NCCL_DEBUG": "INFO",
        "TORCH_HOME": "(set; the value is not shown)",
        "TORCH_LOGS": "x" * 200,
    }


def test_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(system, "_SHARED_MEMORY", tmp_path)
    limits = read_limits()
    assert (limits["open_files"], limits["most_open_files"]) == (1024, None)
    assert limits["shared_memory"] is not None
    assert limits["free_shared_memory"] is not None
    assert limits["shared_memory"] >= limits["free_shared_memory"] > 0


def test_a_system_without_limits_and_shared_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As Windows is."""
    monkeypatch.setattr(system, "resource", None)
    monkeypatch.setattr(system, "_SHARED_MEMORY", tmp_path / "shm")
    assert set(read_limits().values()) == {None}
