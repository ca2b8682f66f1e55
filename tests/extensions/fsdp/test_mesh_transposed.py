"""Linear layers with transposed weights, as those of GPT-2 of transformers, cut by a plan: equal to one device."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from equipoise.extensions.fsdp.mesh.plans.cutting import reasons_of
from equipoise.extensions.fsdp.mesh.plans.sources import written_plan
from tests.extensions.fsdp.programs import Net, assert_close, fit, fsdp, in_processes, weights_of

NAMES: dict[str, Any] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
STYLES: dict[str, Any] = {"blocks.*.up": ColwiseParallel(use_local_output=False), "blocks.*.down": RowwiseParallel()}


class Transposed(Net):
    """Its blocks have such layers, of which one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers.pytorch_utils")
        for block in self.blocks:
            block.up = transformers.Conv1D(14, 7)
            block.down = transformers.Conv1D(7, 14)
            # Without values, biases would hide what is added twice.
            nn.init.normal_(block.up.bias)
            nn.init.normal_(block.down.bias)
        self.blocks[1].up.requires_grad_(False)


def train(plan: dict[str, Any]) -> dict[str, torch.Tensor]:
    module, _ = fit(Transposed, fsdp(tensor=2, tensor_plan=plan), 2, batch_size=12)
    again, _ = fit(Transposed, fsdp(tensor=2, tensor_plan=plan), 2, batch_size=12, max_epochs=1, module=module)
    return weights_of(again)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [NAMES, STYLES], ids=["names", "styles of torch"])
def test_training_equals_that_of_one_device(plan: dict[str, Any]) -> None:
    whole, _ = fit(Transposed)
    whole, _ = fit(Transposed, max_epochs=1, module=whole)
    assert_close(weights_of(whole), in_processes(2, partial(train, plan)))


def test_widths_are_those_of_the_transposed_weight() -> None:
    module = Transposed()
    for option, width in (({"blocks.0.up": "colwise"}, 14), ({"blocks.0.up": "rowwise"}, 7)):
        plan = written_plan(module, option)
        assert plan is not None
        assert reasons_of(module, plan, width) == {}
        assert "is not divisible by 6" in reasons_of(module, plan, 6)["blocks.0.up"]
