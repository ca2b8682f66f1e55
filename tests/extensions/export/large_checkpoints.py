"""Checkpoints larger than the memory that an export may take."""

from pathlib import Path

import torch

from equipoise.parallel.shards.placeholders import make_placeholder
from tests.parallel.shards.folders import save

__all__ = ["MIB", "write"]

MIB = 2**20


def write(path: Path, form: str) -> None:
    """Write a checkpoint of 2 GiB: one tensor of 1 GiB, 16 of 64; their elements are random in some places."""
    state = {"embedding.weight": torch.zeros(1024 * MIB // 1024, 256)}
    for number in range(16):
        state[f"layers.{number}.weight"] = torch.zeros(64 * MIB // 1024, 256)
    torch.manual_seed(0)
    for value in state.values():
        value[::999] = torch.randn(256)
    if form == "file":
        torch.save({"state_dict": state, "global_step": 1}, path)
    else:
        named = {name: make_placeholder(value, name) for name, value in state.items()}
        save(path, state, {"state_dict": named, "global_step": 1}, count=8)
