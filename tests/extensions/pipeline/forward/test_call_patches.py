"""Calls that are reported while a forward is recorded, of modules of both packages of Lightning."""

import types
from typing import Any

import lightning.pytorch as newer
import lightning_utilities.core.rank_zero as rank_zero_module
import pytest

from equipoise.extensions.pipeline.forward.call_patches import patched_logging, patched_progress
from equipoise.interop.lightning.classes import module_classes

_LOG = rank_zero_module.log
older = pytest.importorskip("pytorch_lightning", exc_type=ImportError)
vars(rank_zero_module)["log"] = _LOG  # the import puts a logger of its own there, which other tests would miss


@pytest.mark.parametrize("package", [newer, older], ids=["lightning.pytorch", "pytorch_lightning"])
def test_logged_values_and_progress_of_a_module_are_reported(package: types.ModuleType) -> None:
    module = package.LightningModule()
    seen: list[Any] = []
    kinds = module_classes()
    with patched_logging(kinds, lambda *args, **kwargs: seen.append(args)), patched_progress(kinds, seen.append):
        module.log("loss", 1.0)
        assert module.current_epoch == 0
    assert seen == [("loss", 1.0), "current_epoch"]
