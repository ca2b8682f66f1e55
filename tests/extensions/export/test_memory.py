"""The memory of an export is that of a few pieces of a tensor, whatever the size of the checkpoint."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.extensions.export.large_checkpoints import write

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


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype"), [("file", []), ("file", ["bfloat16"]), ("folder", [])])
def test_the_peak_of_an_export_is_that_of_a_few_pieces(form: str, dtype: list[str], tmp_path: Path) -> None:
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
