"""Networks over sequences, and their training on one device or on divided sequences."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from equipoise import Trainer
from tests.extensions.fsdp.programs import QUIET, weights_of

__all__ = [
    "CASES",
    "POSITIONS",
    "Attention",
    "CountedPositions",
    "Encoder",
    "Gpt",
    "Task",
    "fit",
    "of_transformers",
    "samples",
]

POSITIONS = 16
TOKENS = 20
WIDTH = 16
STEP = 4


def samples(count: int = 20) -> list[dict[str, Tensor]]:
    """Sequences of random tokens of which some are hidden, and labels of which the first half has few or none."""
    draw = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        tokens = torch.randint(1, TOKENS, (POSITIONS,), generator=draw)
        labels = torch.cat([tokens[1:], tokens.new_full((1,), -100)])
        labels[: 8 - number % 3] = -100
        positions = torch.arange(POSITIONS)
        found.append(
            {
                "input_ids": tokens,
                "shift_labels": labels,
                "position_ids": positions,
                "attention_mask": (positions == 0) | (positions > number % 4),
                "number": torch.tensor(float(number)),
            }
        )
    return found


class Task(L.LightningModule):
    """Trains a network to tell the next token. It receives a batch, and returns numbers for each token."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.network(batch).flatten(0, 1), batch["shift_labels"].flatten())

    def training_step(self, batch: Any) -> Any:
        loss = self.loss(batch)
        count = int((batch["shift_labels"] != -100).sum())
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=count)
        self.log("labels", count, reduce_fx="sum", on_step=False, on_epoch=True)
        return {"loss": loss, "loss_weight": count}

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.loss(batch), batch_size=int((batch["shift_labels"] != -100).sum()))

    def predict_step(self, batch: Any) -> Tensor:
        return self.network(batch)

    def configure_optimizers(self) -> Any:
        # AdamW would hide a factor of the gradients.
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Unweighted(Task):
    """Returns the loss alone, whose weight is the number of samples."""

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)["loss"]
        self.log("largest", batch["number"].max(), reduce_fx="max", on_step=False, on_epoch=True)
        return loss


class Weighted(Task):
    """A mean over marked positions that is written by hand, and its weight. Some processes have no such position."""

    def training_step(self, batch: Any) -> Any:
        losses = cross_entropy(
            self.network(batch).transpose(1, 2), batch["shift_labels"], reduction="none", ignore_index=-100
        )
        weight = (batch["shift_labels"] != -100).sum()
        return {"loss": losses.sum() / weight.clamp(min=1), "loss_weight": int(weight)}


class Sharding(Task):
    """Shards its units by itself."""

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for block in self.network.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])


class Embedded(nn.Module):
    """Embeddings of tokens and positions, of which the former are those of the output as well."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)

    def embed(self, batch: Any) -> Tensor:
        return self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.tokens.weight.T


class Encoder(Embedded):
    """Torch's encoder layers under a causal mask, without padded keys."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.options = options

    def forward(self, batch: Any) -> Tensor:
        hidden = self.embed(batch)
        later = torch.ones(hidden.size(1), hidden.size(1), dtype=torch.bool).triu(1)
        return self.logits(self.encoder(hidden, later, ~batch["attention_mask"], **self.options))


class Attention(nn.Module):
    """Causal attention whose heads share keys and values, with one of three forms of the mask."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.queries = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.form = form

    def forward(self, hidden: Tensor, seen: Tensor) -> Tensor:
        query = self.queries(hidden).unflatten(-1, (4, -1)).transpose(1, 2)
        key, value = self.keys(hidden).unflatten(-1, (2, 2, -1)).transpose(1, 3).unbind(2)
        options: dict[str, Any] = {"is_causal": True}
        if self.form == "whole":
            options = {"attn_mask": torch.ones(hidden.size(1), hidden.size(1), dtype=torch.bool).tril()}
        if self.form == "padded":
            triangle = torch.ones(hidden.size(1), hidden.size(1), dtype=torch.bool).tril()
            options = {"attn_mask": seen[:, None, None] & triangle}
        mixed = scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)
        return hidden + self.output(mixed.transpose(1, 2).flatten(2))


class Gpt(Embedded):
    """Blocks of attention and a perceptron, which may be computed again in the backward."""

    def __init__(self, form: str = "causal", again: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(form) for _ in range(2))
        self.perceptron = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.again = again

    def forward(self, batch: Any) -> Tensor:
        hidden = self.embed(batch)
        for block in self.blocks:
            run = partial(checkpoint, block, use_reentrant=False) if self.again else block
            hidden = run(hidden, batch["attention_mask"])
        return self.logits(hidden + self.perceptron(hidden))


class CountedPositions(Gpt):
    """Positions from the length of the input."""

    def embed(self, batch: Any) -> Tensor:
        positions = torch.arange(batch["input_ids"].size(1))
        return self.tokens(batch["input_ids"]) + self.positions(positions)


class Multihead(Embedded):
    """Torch's attention with projections apart, called as its documentation has it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, kdim=WIDTH, vdim=8, batch_first=True)
        self.values = nn.Linear(WIDTH, 8)

    def forward(self, batch: Any) -> Tensor:
        hidden = self.embed(batch)
        later = torch.ones(hidden.size(1), hidden.size(1), dtype=torch.bool).triu(1)
        mixed, _ = self.attention(hidden, hidden, self.values(hidden), attn_mask=later)
        return self.logits(hidden + mixed)


class Pretrained(nn.Module):
    """A small model of transformers, with or without hidden keys."""

    def __init__(self, kind: str, *, hides: bool = True, **options: Any) -> None:
        super().__init__()
        import transformers

        self.hides = hides

        model_class = getattr(transformers, kind)
        self.model = model_class(model_class.config_class(vocab_size=TOKENS, **options))
        for part in [*self.model.modules()]:
            for name, layer in part.named_children():
                # Those of transformers round to float32, one way or the other where the last digit of float64 differs.
                if type(layer).__name__.endswith("RMSNorm"):
                    setattr(part, name, nn.RMSNorm(WIDTH, eps=1e-6))

    def forward(self, batch: Any) -> Tensor:
        mask = batch["attention_mask"].long() if self.hides else None
        return self.model(batch["input_ids"], attention_mask=mask).logits


SIZES = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0}
GPT2: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def of_transformers(kind: str, task: Callable[[nn.Module], Any] = Task, **options: Any) -> Callable[[], Any]:
    return lambda: task(Pretrained(kind, **options))


# How a module is made, and the options of the trainer.
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "encoder": (lambda: Task(Encoder()), {}),
    "encoder with the hint": (lambda: Task(Encoder(is_causal=True)), {"accumulate_grad_batches": 2}),
    "heads": (lambda: Task(Multihead()), {}),
    "gpt": (lambda: Task(Gpt()), {"gradient_clip_val": 0.1}),
    "sharded by the module": (lambda: Sharding(Gpt()), {}),
    "gpt with a mask": (lambda: Task(Gpt("whole")), {}),
    "gpt with padding": (lambda: Task(Gpt("padded")), {}),
    "computed again": (lambda: Task(Gpt("padded", again=True)), {}),
    "computed again by the trainer": (lambda: Task(Gpt()), {"activation_checkpointing": ["network.blocks.*"]}),
    "unweighted": (lambda: Unweighted(Gpt()), {"accumulate_grad_batches": 2}),
    "weighted by hand": (lambda: Weighted(Gpt()), {"accumulate_grad_batches": 2}),
    "Llama": (of_transformers("LlamaForCausalLM", **DECODER), {}),
    "Mistral": (of_transformers("MistralForCausalLM", **DECODER, sliding_window=5), {}),
    # Longer than a part of a sequence.
    "a window": (of_transformers("MistralForCausalLM", hides=False, **DECODER, sliding_window=10), {}),
    "GPT-2": (of_transformers("GPT2LMHeadModel", **GPT2), {}),
    "BERT": (of_transformers("BertForMaskedLM", **BERT), {}),
}


def fit(
    make: Callable[[], Any],
    strategy: Any = "single_device",
    processes: int = 1,
    *,
    rows: int = 1,
    count: int = 20,
    module: Any = None,
    ckpt_path: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train for two epochs with 4 sequences in a step, and validate; return weights, logged values and predictions."""
    options = {"precision": "64-true", "max_epochs": 2, **QUIET, **options}
    trainer = Trainer(strategy=strategy, devices=["cpu"] * processes, **options)
    torch.manual_seed(3)
    module = make() if module is None else module
    loader: Any = DataLoader(samples(count), batch_size=STEP // rows)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader, ckpt_path=ckpt_path)
    values = {f"{name} in fit": float(value) for name, value in trainer.callback_metrics.items()}
    outputs = trainer.predict(module, DataLoader(samples(4), batch_size=4))  # type: ignore[arg-type]
    assert outputs is not None
    return {**values, **weights_of(module), "predictions": torch.cat(outputs)}
