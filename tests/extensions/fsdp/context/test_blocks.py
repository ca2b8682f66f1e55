"""Sequences divided between blocks alone, in networks that see several positions elsewhere: equal to one device."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise import StepError
from equipoise.extensions.fsdp.mesh.context.attention import attend
from equipoise.extensions.fsdp.mesh.context.blocks.divided_blocks import DividedBlocks
from equipoise.extensions.fsdp.mesh.context.row_mode import RowMode
from equipoise.extensions.fsdp.mesh.context.sequence_row import SequenceRow
from tests.extensions.fsdp.context.networks import (
    POSITIONS,
    TOKENS,
    WIDTH,
    Attention,
    Encoder,
    Gpt,
    Task,
    Unweighted,
    Weighted,
    fit,
)
from tests.extensions.fsdp.programs import (
    SavesAfter,
    assert_close,
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


class Everywhere(Attention):
    """Sees all positions that are not hidden."""

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        query = self.queries(hidden)
        mixed = functional.scaled_dot_product_attention(query, query, query, seen[:, None])
        return hidden + self.output(mixed)


class Unordered(Convolving):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Everywhere("") for _ in range(3))


class Read(L.LightningModule):
    """The encoder of T5, whose attention has a bias of distances, with padded tokens."""

    def __init__(self, kind: str = "T5EncoderModel") -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": TOKENS}
        model_class = getattr(transformers, kind)
        self.network = model_class(model_class.config_class(**sizes, dropout_rate=0.0, decoder_start_token_id=0))
        for part in [*self.network.modules()]:
            for name, layer in part.named_children():
                # Those of transformers compute in float32.
                if type(layer).__name__ == "T5LayerNorm":
                    setattr(part, name, nn.RMSNorm(WIDTH, eps=1e-6))
        for parameter in self.network.parameters():
            nn.init.normal_(parameter, std=0.2)

    def training_step(self, batch: Any) -> Tensor:
        inputs = {"attention_mask": batch["attention_mask"].long()}
        if hasattr(self.network, "decoder"):
            inputs["decoder_input_ids"] = batch["input_ids"]
        hidden: Tensor = self.network(batch["input_ids"], **inputs).last_hidden_state
        return hidden.square().mean(-1).sub(batch["number"][:, None]).square().mean()

    def predict_step(self, batch: Any) -> Tensor:
        hidden: Tensor = self.network(batch["input_ids"]).last_hidden_state
        return hidden

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.training_step(batch))

    configure_optimizers = Task.configure_optimizers


# How a module is made, the names of its lists of blocks, and the options of the trainer.
CASES: dict[str, tuple[Callable[[], Any], list[str], dict[str, Any]]] = {
    "causal": (lambda: Task(Convolving()), BLOCKS, {"gradient_clip_val": 0.1}),
    "with a mask": (lambda: Task(Convolving("whole")), BLOCKS, {}),
    "with padding": (lambda: Task(Convolving("padded")), ["**.blocks"], {"accumulate_grad_batches": 2}),
    "unordered": (lambda: Unweighted(Unordered()), BLOCKS, {"accumulate_grad_batches": 2}),
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
        (4, {"context": 2, "tensor": 2, "tensor_plan": PERCEPTRON}, ["with padding", "unordered"]),
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


@pytest.mark.slow
def test_a_run_continues_within_a_window_on_one_device(tmp_path: Path) -> None:
    path = tmp_path / "open.ckpt"
    make, blocks, options = CASES["weighted by hand"]
    strategy = fsdp(context=2, context_blocks=blocks)
    fit(make, strategy, 2, max_epochs=1, callbacks=[SavesAfter(path, 2)], **options)
    assert_close(fit(make, **options), fit(make, ckpt_path=path, **options), tolerance=1e-10)


class Noisy(Attention):
    """Draws numbers."""

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        NOTED.append(functional.dropout(torch.ones_like(hidden), 0.5))
        return super().forward(hidden, seen)


NOTED: list[Tensor] = []


class Dropping(Convolving):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Noisy("causal")])

    def forward(self, batch: Any) -> Tensor:
        NOTED.append(functional.dropout(torch.ones(4, 8), 0.5))
        return super().forward(batch)


def dropped() -> Any:
    fit(lambda: Task(Dropping()), fsdp(context=2, context_blocks=BLOCKS), 2, max_epochs=1, count=4)
    found: list[Any] = [None, None]
    # The comparison of the first batch has noted a part and a whole of each.
    torch.distributed.all_gather_object(found, NOTED[4:6])
    return found


@pytest.mark.slow
def test_dropout_differs_between_parts_alone() -> None:
    (outside, inside), (others_outside, others_inside) = in_processes(2, dropped)
    assert inside.shape == (4, 10, WIDTH)
    assert torch.equal(outside, others_outside)
    assert not torch.equal(inside, others_inside)


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
    assert_refused_in_processes(2, runs, {case: words for case, (*_, words) in REFUSED.items()})


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
    network = nn.Module()
    network.coder = nn.Sequential(nn.TransformerEncoderLayer(WIDTH, 2, 32, **options))
    network.decoder = nn.Sequential(nn.TransformerDecoderLayer(WIDTH, 2, 32, **options))
    network.unnamed = nn.Sequential(Unnamed(WIDTH, 2, 32, **options))
    whole = torch.randn(SQUARE, SQUARE, WIDTH, dtype=torch.float64)
    keys = torch.arange(SQUARE)[None] > torch.arange(SQUARE)[:, None] % 3 + 4
    memories = {length: torch.randn(SQUARE, length, WIDTH, dtype=torch.float64) for length in (4, 5)}
    calls: dict[str, Callable[[], Tensor]] = {
        "padding": lambda: network.coder[0](whole, src_key_padding_mask=keys),
        "pairs": lambda: network.coder[0](whole, torch.ones(SQUARE, SQUARE, dtype=torch.bool).triu(1)),
        "unnamed": lambda: network.unnamed[0](whole, keys),
        "memory": lambda: network.decoder[0](whole, memories[5]),
        "memory like a part": lambda: network.decoder[0](whole, memories[4]),
    }
    found: dict[str, Any] = {}
    for name, call in calls.items():
        expected = call()
        blocks = DividedBlocks(network, ["*"], row)
        blocks.begin()
        try:
            with RowMode(row):
                found[name] = float((call() - expected).detach().abs().max())
        except StepError as error:
            found[name] = str(error)
        finally:
            blocks.end()
            blocks.close()
    return found


@pytest.mark.slow
def test_shapes_that_may_be_of_a_part_or_a_whole() -> None:
    found = in_processes(2, square)
    assert max(found[name] for name in ("padding", "pairs", "memory")) < 1e-12
    assert "of shape [8, 8] in the argument 'seen'" in found["unnamed"]
    assert "has 4 positions, as many as each process has of sequences of 8" in found["memory like a part"]


def test_attention_that_is_not_batch_first_is_refused() -> None:
    network = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2), 1)
    refuses(lambda: DividedBlocks(network, ["layers"], Mock()), "Make its layers with batch_first=True")


def attended() -> list[float]:
    """Return differences to whole attention, for lengths that a row of two processes does not divide."""
    row = SequenceRow(torch.distributed.distributed_c10d.GroupMember.WORLD)
    draw = torch.Generator().manual_seed(4)
    found = []
    for length in range(1, POSITIONS):
        whole = torch.randn(2, 3, length, 4, generator=draw, dtype=torch.float64, requires_grad=True)
        mask = torch.rand(length, length, generator=draw) > 0.4
        mask |= torch.eye(length, dtype=torch.bool)
        row.enter(length)
        for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
            expected = functional.scaled_dot_product_attention(whole, whole, whole, **options)  # type: ignore[arg-type]
            (slope,) = torch.autograd.grad(expected.square().sum(), whole)
            here: Any = dict(options)
            if "attn_mask" in options:
                here = {"attn_mask": row.own_part(mask, 0)}
            part = row.own_part(whole, 2)
            computed = row.gather(attend(row, part, part, part, **here), 2)
            (summed,) = torch.autograd.grad(computed.square().sum() / row.size, whole)
            total = row.all_reduce(summed)
            differences = (computed.detach() - expected.detach(), total - slope)
            found += [float(difference.abs().max()) for difference in differences]
    return found


@pytest.mark.slow
def test_attention_over_any_length_equals_whole_attention() -> None:
    assert max(in_processes(2, attended)) < 1e-12
