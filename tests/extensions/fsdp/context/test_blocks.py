"""Sequences divided between blocks alone, in networks that see several positions elsewhere: equal to one device."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise import StepError
from equipoise.extensions.fsdp.mesh.context.blocks.divided_blocks import DividedBlocks
from equipoise.extensions.fsdp.mesh.context.row_mode import RowMode
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from tests.extensions.fsdp.context.networks import (
    TOKENS,
    WIDTH,
    Attention,
    Encoder,
    Gpt,
    Task,
    Weighted,
    fit,
)
from tests.extensions.fsdp.programs import (
    assert_refused_in_processes,
    assert_same_in_processes,
    fsdp,
    in_processes,
)
from tests.support.trainer_runs import refuses

# The bias of T5 is a view, which it does not change in place.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The checkpoint holds states of callbacks", "ignore:FSDP2-wrapped module (.*) returned a view"
)

BLOCKS = ["network.blocks"]


class Convolving(Gpt):
    """A convolution and a further position before the blocks, so that 17 are divided, and a mean behind them."""

    def __init__(self, form: str = "causal") -> None:
        super().__init__(form)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, batch: Any) -> Tensor:
        hidden = self.embed(batch)
        hidden = hidden + self.convolution(hidden.transpose(1, 2)).transpose(1, 2)
        hidden = torch.cat([self.first.expand(len(hidden), -1, -1), hidden], 1)
        seen = functional.pad(batch["attention_mask"], (1, 0), value=True)
        for block in self.blocks:
            hidden = block(hidden, seen)
        return self.logits(self.perceptron(hidden[:, 1:] + hidden.mean(1, keepdim=True)))


class Read(Task):
    """The encoder of T5, whose attention has a bias of distances, with padded tokens."""

    def __init__(self, kind: str = "T5EncoderModel") -> None:
        transformers = pytest.importorskip("transformers")
        sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": TOKENS}
        model_class = getattr(transformers, kind)
        super().__init__(model_class(model_class.config_class(**sizes, dropout_rate=0.0, decoder_start_token_id=0)))
        for part in [*self.network.modules()]:
            for name, layer in part.named_children():
                # Those of transformers compute in float32.
                if type(layer).__name__ == "T5LayerNorm":
                    setattr(part, name, nn.RMSNorm(WIDTH, eps=1e-6))
        for parameter in self.network.parameters():
            nn.init.normal_(parameter, std=0.2)

    def predict_step(self, batch: Any) -> Tensor:
        inputs = {"attention_mask": batch["attention_mask"].long()}
        if hasattr(self.network, "decoder"):
            inputs["decoder_input_ids"] = batch["input_ids"]
        hidden: Tensor = self.network(batch["input_ids"], **inputs).last_hidden_state
        return hidden

    def loss(self, batch: Any) -> Tensor:
        return self.predict_step(batch).square().mean(-1).sub(batch["number"][:, None]).square().mean()

    def training_step(self, batch: Any) -> Tensor:
        return self.loss(batch)


# How a module is made, the names of its lists of blocks, and the options of the trainer.
CASES: dict[str, tuple[Callable[[], Any], list[str], dict[str, Any]]] = {
    "causal": (lambda: Task(Convolving()), BLOCKS, {"gradient_clip_val": 0.1}),
    "with a mask": (lambda: Task(Convolving("whole")), BLOCKS, {}),
    "with padding": (lambda: Task(Convolving("padded")), ["**.blocks"], {"accumulate_grad_batches": 2}),
    "weighted by hand": (lambda: Weighted(Convolving()), BLOCKS, {"accumulate_grad_batches": 2}),
    "layers of torch": (lambda: Task(Encoder()), ["network.encoder.layers"], {}),
    "a bias of distances": (Read, ["network.encoder.block"], {}),
}


PERCEPTRON = {"network.perceptron.1": "colwise", "network.perceptron.3": "rowwise"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options", "cases"),
    [
        (2, {"context": 2}, [*CASES]),
        (4, {"context": 4}, ["with a mask", "with padding", "a bias of distances"]),
        (4, {"context": 2, "tensor": 2, "tensor_plan": PERCEPTRON}, ["with padding"]),
    ],
    ids=["context 2", "context 4", "context 2 x tensor 2"],
)
def test_training_with_divided_blocks_equals_that_of_one_device(
    processes: int, options: dict[str, Any], cases: list[str]
) -> None:
    expected, calls = {}, {}
    for case in cases:
        make, blocks, more = CASES[case]
        expected[case] = partial(fit, make, count=12, **more)
        calls[case] = partial(fit, make, fsdp(context_blocks=blocks, **options), processes, count=12, **more)
    assert_same_in_processes(processes, expected, calls, tolerance=1e-10)


# What is refused


class Dropped(Convolving):
    """Leaves blocks out."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, batch: Any) -> Tensor:
        hidden = self.embed(batch)
        for number, block in enumerate(self.blocks):
            if number != self.number:
                hidden = block(hidden, batch["attention_mask"])
        return self.logits(hidden)


class Counted(Attention):
    """Shifts positions."""

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        return super().forward(hidden + hidden.roll(1, 1), seen)


class Shifted(Convolving):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counted("causal")])


class Nested(Convolving):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH))])


REFUSED: dict[str, tuple[Callable[[], Any], list[str], dict[str, Any], str]] = {
    "no list": (lambda: Task(Convolving()), ["network"], {}, "has 'network', which names no nn."),
    "nested": (lambda: Task(Nested()), ["**.blocks", "**.blocks.0"], {}, "Name one of both"),
    "without the first": (lambda: Task(Dropped(0)), BLOCKS, {}, "were not called one after the other"),
    "without the last": (lambda: Task(Dropped(1)), BLOCKS, {}, "were not called one after the other"),
    "other positions": (lambda: Task(Shifted()), BLOCKS, {}, "Within the blocks of `context_blocks` each"),
    "computed again": (
        lambda: Task(Convolving()),
        BLOCKS,
        {"activation_checkpointing": ["network.blocks.*"]},
        "goes together with no activation checkpointing",
    ),
    "a decoder": (
        partial(Read, "T5Model"),
        ["network.decoder.block"],
        {},
        "the bias of distances of a decoder is no mask over all positions",
    ),
}


@pytest.mark.slow
def test_blocks_that_cannot_be_divided_are_refused() -> None:
    runs = {
        case: partial(fit, make, fsdp(context=2, context_blocks=blocks), 2, count=8, **options)
        for case, (make, blocks, options, _) in REFUSED.items()
    }
    assert_refused_in_processes(2, runs, REFUSED)


SQUARE = 8


class Unnamed(nn.TransformerEncoderLayer):
    """Its mask of keys has no name that tells what it is."""

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden, src_key_padding_mask=seen)


def square() -> dict[str, Any]:
    """Return differences to whole sequences, of as many samples as positions, and errors."""
    row = SequenceRow(torch.distributed.distributed_c10d.GroupMember.WORLD)
    torch.manual_seed(3)
    options: Any = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    kinds = {"coder": nn.TransformerEncoderLayer, "unnamed": Unnamed, "decoder": nn.TransformerDecoderLayer}
    network = nn.ModuleDict({name: nn.Sequential(kind(WIDTH, 2, 32, **options)) for name, kind in kinds.items()})
    whole = torch.randn(SQUARE, SQUARE, WIDTH, dtype=torch.float64)
    keys = torch.arange(SQUARE)[None] > torch.arange(SQUARE)[:, None] % 3 + 4

    def difference(name: str, *inputs: Tensor, **masks: Tensor) -> Any:
        layer, blocks = network[name][0], DividedBlocks(network, ["*"], row)  # type: ignore[index]
        expected = layer(whole, *inputs, **masks)
        blocks.begin()
        try:
            with RowMode(row):
                return float((layer(whole, *inputs, **masks) - expected).detach().abs().max())
        except StepError as error:
            return str(error)
        finally:
            blocks.end()
            blocks.close()

    return {
        "padding": difference("coder", src_key_padding_mask=keys),
        "pairs": difference("coder", torch.ones(SQUARE, SQUARE, dtype=torch.bool).triu(1)),
        "unnamed": difference("unnamed", keys),
        "memory": difference("decoder", torch.ones(SQUARE, 5, WIDTH, dtype=torch.float64)),
        "memory like a part": difference("decoder", torch.ones(SQUARE, 4, WIDTH, dtype=torch.float64)),
    }


@pytest.mark.slow
def test_shapes_that_may_be_of_a_part_or_a_whole() -> None:
    found = in_processes(2, square)
    assert max(found[name] for name in ("padding", "pairs", "memory")) < 1e-12
    assert "of shape [8, 8] in the argument 'seen'" in found["unnamed"]
    assert "has 4 positions, as many as each process has of sequences of 8" in found["memory like a part"]


def test_attention_that_is_not_batch_first_is_refused() -> None:
    network = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2), 1)
    refuses(lambda: DividedBlocks(network, ["layers"], Mock()), "Make its layers with batch_first=True")
