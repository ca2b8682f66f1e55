"""Checkpoints of 1 GiB, and how much memory a program needs that reads them."""

import subprocess
import sys
from pathlib import Path

import torch

from equipoise.parallel.shards.placeholders import make_placeholder
from tests.parallel.shards.folders import save

__all__ = ["mebibytes_needed", "write"]

MIB = 2**20

_MEASURED = """
import re, sys
from pathlib import Path
{imports}

def memory(name):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{{name}}:\\s+(\\d+) kB", status)[1]) / 1024

Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
{statement}
print(memory("VmHWM") - before)
"""


def write(path: Path, form: str) -> None:
    """Write a checkpoint of 1 GiB, a "file" or a "folder": one tensor of 512 MiB, 16 of 32; some values are random."""
    state = {"embedding.weight": torch.zeros(MIB // 2, 256)}
    state |= {f"layers.{number}.weight": torch.zeros(MIB // 32, 256) for number in range(16)}
    torch.manual_seed(0)
    for value in state.values():
        value[::999] = torch.randn(256)
    if form == "file":
        torch.save({"state_dict": state, "global_step": 1}, path)
    else:
        named = {name: make_placeholder(value, name) for name, value in state.items()}
        save(path, state, {"state_dict": named, "global_step": 1}, count=8)


def mebibytes_needed(imports: str, statement: str, *arguments: str) -> float:
    """Return by how much an interpreter grows at its peak in a statement, which finds the arguments in `sys.argv`."""
    # An interpreter of its own: a fork shares memory with others.
    command = [sys.executable, "-c", _MEASURED.format(imports=imports, statement=statement), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)
