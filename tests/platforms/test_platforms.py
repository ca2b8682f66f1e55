"""Other operating systems than Linux, simulated: what works there, and what is refused before it starts."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import equipoise
from tests.platforms.training import fit

# The strategies under which fits are compared with those of this process.
STRATEGIES = {"windows": ["single_device", "dp"], "macos": ["single_device", "dp", "ddp"]}
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("system", STRATEGIES)
def test_a_program_on_another_system(system: str, tmp_path: Path) -> None:
    """A real interpreter, since it must not have imported Equipoise yet."""
    for strategy in STRATEGIES[system]:
        torch.save(fit(strategy, tmp_path / "here" / strategy), tmp_path / f"{strategy}.pt")
    program = ["-X", "warn_default_encoding", "-m", "tests.platforms.checks", system, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *program], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_a_build_of_torch_without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some for Windows are; the error is not about a name of torch."""
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(
        ImportError, match=r"needs torch\.distributed, which this build of torch .* lacks.*Install a build"
    ):
        importlib.reload(equipoise).__getattr__("Trainer")
