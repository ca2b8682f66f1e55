"""A check of imports that sees nothing would let everything pass."""

from pathlib import Path

import pytest

from tests.support.imports import imports

SOURCE = """
from typing import TYPE_CHECKING
import hydra.core
from torch import nn
def late():
    from omegaconf import OmegaConf
    import_module("hydra.types")
if TYPE_CHECKING:
    from lightning import Trainer
else:
    import json
"""


@pytest.mark.thorough
def test_every_form_of_import_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(SOURCE)
    at_run_time = {
        ("typing", "TYPE_CHECKING", False),
        ("hydra.core", None, False),
        ("torch", "nn", False),
        ("omegaconf", "OmegaConf", True),
        ("hydra.types", None, True),
        ("json", None, False),
    }
    assert set(imports(path, typing=False)) == at_run_time
    assert set(imports(path, typing=True)) == at_run_time | {("lightning", "Trainer", False)}
