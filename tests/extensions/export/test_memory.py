"""The memory of an export is that of a few pieces of a tensor, whatever the size of the checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.support.large_checkpoints import mebibytes_needed, write

IMPORTS = "from equipoise.extensions.export import export_weights"
EXPORT = "export_weights(*sys.argv[1:3], dtype=sys.argv[3] if len(sys.argv) > 3 else None)"


@pytest.mark.slow
@pytest.mark.parametrize(("form", "dtype"), [("file", ["bfloat16"]), ("folder", [])])
def test_the_peak_of_an_export_is_that_of_a_few_pieces(form: str, dtype: list[str], tmp_path: Path) -> None:
    checkpoint = tmp_path / "x.ckpt"
    out = tmp_path / "x.safetensors"
    write(checkpoint, form)
    growth = mebibytes_needed(IMPORTS, EXPORT, str(checkpoint), str(out), *dtype)
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
