"""The memory of an export is that of a few pieces of a tensor, whatever the size of the checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from equipoise.parallel.shards.placeholders import make_placeholder
from tests.parallel.shards.folders import save

MIB = 2**20

# Prints the growth of the memory at its peak over that after the import, in MiB.
EXPORT = """
import re, sys
from pathlib import Path
from equipoise.extensions.export import export_weights

def memory(name):
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{name}:\\s+(\\d+) kB", status)[1]) / 1024

Path("/proc/self/clear_refs").write_text("5")
before = memory("VmRSS")
export_weights(*sys.argv[1:3], dtype=sys.argv[3] if len(sys.argv) > 3 else None)
print(memory("VmHWM") - before)
"""


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


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype"), [("file", []), ("file", ["bfloat16"]), ("folder", [])])
def test_peak(form: str, dtype: list[str], tmp_path: Path) -> None:
    checkpoint = tmp_path / "x.ckpt"
    out = tmp_path / "x.safetensors"
    write(checkpoint, form)
    # An interpreter of its own: a fork shares memory with others.
    command = [sys.executable, "-c", EXPORT, str(checkpoint), str(out), *dtype]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    growth = float(done.stdout)
    print(f"{form} {dtype}: {growth:.0f} MiB")
    assert 8 < growth < 300
    with safe_open(out, framework="pt") as content:
        torch.manual_seed(0)
        for name in ["embedding.weight", *(f"layers.{number}.weight" for number in range(16))]:
            row = torch.randn(256)
            if dtype:
                row = row.bfloat16()
            part = content.get_slice(name)[: 2 * 999]
            assert torch.equal(part[[0, 999]], torch.stack([row, row]))
            assert part.count_nonzero() == 2 * 256
    out.unlink()
