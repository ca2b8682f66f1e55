"""Cut layers are compared with whole ones before the first step, and refused if they compute something else."""

import threading
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleOutput, parallelize_module

from equipoise.extensions.fsdp.mesh.without_dropout import without_dropout
from tests.extensions.fsdp.mesh_modules import Cut, CutHeads, WithoutDropout, cut_blocks
from tests.extensions.fsdp.programs import (
    Block,
    Net,
    assert_close,
    assert_refused_in_processes,
    fit,
    fsdp,
    in_processes,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:Dropout between cut layers")


class WholeNorm(WithoutDropout):
    """A norm with whole weights that receives a part of the sequence in each process."""

    def configure_model(self) -> None:
        plan = {
            "embedding": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
            "norm": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        }
        parallelize_module(self.embedding, self.device_mesh["tensor_parallel"], plan["embedding"])
        parallelize_module(self.norm, self.device_mesh["tensor_parallel"], plan["norm"])
        cut_blocks(self)

    def forward(self, features: Tensor) -> Tensor:
        return Net.forward(self, self.norm(self.embedding(features.unsqueeze(-1))).mean(-1))


class WrongHeads(CutHeads):
    """Forgets that each process has a part of the heads."""

    def configure_model(self) -> None:
        heads = self.attention.heads
        super().configure_model()
        self.attention.heads = heads


class Watched(Net):
    """A buffer sees what passes between two layers that its plan cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(()))
        self.blocks[0].down.register_forward_pre_hook(self.watch)

    def watch(self, layer: nn.Module, args: Any) -> None:
        self.running.add_(args[0].detach().square().sum())

    def tensor_plan(self) -> dict[str, str]:
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class DroppingBlock(Block):
    """Drops activations between layers that are cut, which draws other numbers than on one device."""

    def forward(self, hidden: Tensor) -> Tensor:
        inner = torch.tanh(self.up(self.norm(hidden)))
        return hidden + self.down(nn.functional.dropout(inner, 0.3, self.training))


class DropsWithin(Cut):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DroppingBlock(7) for _ in range(3))


class Stateful(Cut):
    """Has state of all kinds that a step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.noise = torch.Generator().manual_seed(4)
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0] += 0.5
        self.seen.append(batch_idx)
        features = self.norm(batch[0]) + torch.rand(8, generator=self.noise) + torch.rand(8)
        return super().training_step([features, batch[1]], batch_idx)


class Uncopied(Cut):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


REFUSED: dict[str, tuple[Any, list[str]]] = {
    "a whole norm": (
        WholeNorm,
        [
            "In the first batch the gradient of norm.",
            "is whole, so each process computes its gradient from all inputs of its layer",
            "FSDPStrategy(compare_layers=False) trains without this comparison.",
        ],
    ),
    "wrong heads": (
        WrongHeads,
        ["In the first batch the loss differs by", "the number of heads is divided by the size of the mesh"],
    ),
    "a watched layer": (Watched, ["the buffer 'running' has other values with cut layers"]),
}


@pytest.mark.slow
def test_layers_that_compute_something_else_are_refused() -> None:
    runs = {name: partial(fit, kind, fsdp(tensor=2), 2) for name, (kind, _) in REFUSED.items()}
    assert_refused_in_processes(2, runs, REFUSED)


def untouched() -> list[Any]:
    """Return weights and logged values with the comparison and without; called in every process."""
    results: list[Any] = []
    for kind in (Stateful, DropsWithin):
        outcomes = []
        for compare in (True, False):
            module, trainer = fit(kind, fsdp(tensor=2, compare_layers=compare), 2, accumulate_grad_batches=2, count=48)
            seen = torch.tensor(getattr(module, "seen", 0))
            outcomes.append({**weights_of(module), **trainer.callback_metrics, "seen": seen})
        results.append(outcomes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, _ = fit(Uncopied, fsdp(tensor=2), 2, batch_size=12)
        for kind in (DropsWithin, CutHeads):
            fit(kind, fsdp(tensor=2), 2, batch_size=12, max_epochs=1)
    results.append([weights_of(module), [str(warning.message) for warning in caught]])
    return results


@pytest.mark.slow
def test_a_run_has_the_bits_of_one_without_the_comparison() -> None:
    """Buffers, generators, attributes, logged values and the batch are those of a run without it, to the bit."""
    *compared, (weights, messages) = in_processes(2, untouched)
    for with_comparison, without in compared:
        assert_close(without, with_comparison, tolerance=0.0)
    one, _ = fit(Net)
    assert_close(weights_of(one), weights)
    # Beside the layers, dropout sees whole tensors.
    (dropout,) = [message for message in messages if "Dropout between cut layers" in message]
    assert "a tensor of shape [12, 14] is one of [12, 7] in each process" in dropout
    (message,) = [message for message in messages if "were not compared" in message]
    assert "TypeError: cannot pickle '_thread.lock' object" in message


def test_no_dropout_drops_within_the_comparison() -> None:
    ones = torch.ones(2, 4, 8, dtype=torch.float64)
    attention = nn.MultiheadAttention(8, 2, dropout=0.9, dtype=torch.float64)
    expected = attention.eval()(ones, ones, ones, need_weights=False)[0]
    attention.train()
    state = torch.get_rng_state()
    with without_dropout():
        assert torch.equal(nn.Dropout(0.9)(ones), ones)
        assert torch.equal(nn.functional.alpha_dropout(ones, 0.9, training=True), ones)
        assert torch.equal(attention(ones, ones, ones, need_weights=False)[0], expected)
        attended = nn.functional.scaled_dot_product_attention(ones, ones, ones, None, 0.9)
    assert torch.equal(attended, nn.functional.scaled_dot_product_attention(ones, ones, ones))
    assert torch.equal(state, torch.get_rng_state())
