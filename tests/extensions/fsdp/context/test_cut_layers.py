"""Divided sequences beside cut layers: equal to one device, in float64; on four processes, context 2 x tensor 2."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention

from tests.extensions.fsdp.context.networks import CASES, POSITIONS, CountedPositions, Gpt, Task, fit
from tests.extensions.fsdp.programs import assert_refused_in_processes, assert_same_in_processes, fsdp, in_processes

pytestmark = pytest.mark.slow

PERCEPTRON = {"network.perceptron.1": "colwise", "network.perceptron.3": "rowwise"}


class Cutting(Task):
    """Cuts and shards its layers by itself."""

    options: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            plan = {"1": ColwiseParallel(**self.options), "3": RowwiseParallel()}
            parallelize_module(self.network.perceptron, self.device_mesh["tensor_parallel"], plan)
            for block in self.network.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])


class Attending(nn.Module):
    """Attention of outputs of a cut layer."""

    def forward(self, hidden: Tensor) -> Tensor:
        return scaled_dot_product_attention(hidden, hidden, hidden, is_causal=True)


class Distributed(Cutting):
    """Leaves its cut outputs distributed."""

    options = {"use_local_output": False}

    def __init__(self, network: Any) -> None:
        super().__init__(network)
        network.perceptron[2] = Attending()


# How a module is made, its plan, and the options of the trainer.
CUT: dict[str, tuple[Callable[[], Any], Any, dict[str, Any]]] = {
    "Llama": (CASES["Llama"][0], None, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "weighted by hand": (CASES["weighted by hand"][0], PERCEPTRON, {"accumulate_grad_batches": 2}),
    "computed again": (CASES["computed again"][0], PERCEPTRON, {"activation_checkpointing": ["network.perceptron"]}),
    "by the module": (lambda: Cutting(Gpt()), None, {"gradient_clip_val": 0.1}),
}


def test_training_on_divided_sequences_with_cut_layers_equals_that_of_one_device() -> None:
    expected, calls = {}, {}
    for case, (make, plan, options) in CUT.items():
        expected[case] = partial(fit, make, **options)
        calls[case] = partial(fit, make, fsdp(tensor=2, context=2, tensor_plan=plan), 4, **options)
    assert_same_in_processes(4, expected, calls, tolerance=1e-10)


class Dropping(Task):
    """Notes what dropout leaves of ones, in the module and in the process."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__(network)
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any) -> Any:
        ones = torch.ones_like(batch["input_ids"], dtype=torch.float64)
        self.kept += [nn.functional.dropout(ones, 0.5), torch.rand(4)]
        return super().training_step(batch)


def dropped() -> Any:
    module = Dropping(Gpt())
    strategy = fsdp(tensor=2, context=2, tensor_plan=PERCEPTRON)
    fit(Gpt, strategy, 4, module=module, max_epochs=1, count=4)
    found: list[Any] = [None] * 4
    torch.distributed.all_gather_object(found, module.kept)
    return found


def test_dropout_differs_between_parts_alone() -> None:
    """Ranks 0 and 1 have the same positions, and so have ranks 2 and 3. All else that is drawn is the same in a row."""
    drops, others = zip(*in_processes(4, dropped), strict=True)
    assert drops[0].shape == (4, POSITIONS // 2)
    assert torch.equal(drops[0], drops[1])
    assert torch.equal(drops[2], drops[3])
    assert not torch.equal(drops[0], drops[2])
    assert all(torch.equal(others[0], other) for other in others)


REFUSED: dict[str, tuple[Callable[[], Any], Any, str]] = {
    "positions": (
        lambda: Task(CountedPositions()),
        PERCEPTRON,
        "ConfigurationError: The cut layers on parts of sequences compute something else than whole layers on",
    ),
    "distributed": (lambda: Distributed(Gpt()), None, "return plain tensors: use_local_output=True"),
}


def test_what_cannot_be_computed_beside_cut_layers_is_refused() -> None:
    runs = {
        case: partial(fit, make, fsdp(tensor=2, context=2, tensor_plan=plan), 4, count=8)
        for case, (make, plan, _) in REFUSED.items()
    }
    assert_refused_in_processes(4, runs, REFUSED)
