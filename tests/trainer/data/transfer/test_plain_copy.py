"""The plain copy of a batch: what lies on its device already stays as it is."""

from typing import Any

import pytest
import torch

from equipoise.trainer.data.transfer.plain_copy import copy_batch

CPU = torch.device("cpu")
TENSOR = torch.ones(2)


@pytest.mark.parametrize("batch", [TENSOR, (TENSOR, TENSOR), [TENSOR], []], ids=["tensor", "tuple", "list", "empty"])
def test_batches_on_their_device_stay_as_they_are(batch: Any) -> None:
    assert copy_batch(batch, CPU) is batch


def test_other_batches_are_copied_as_lightning_does() -> None:
    meta = torch.device("meta")
    batch = copy_batch({"x": TENSOR, "y": ["name", (TENSOR,)]}, meta)
    assert batch["x"].device == batch["y"][1][0].device == meta
    assert batch["y"][0] == "name"
