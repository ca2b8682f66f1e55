"""Networks that were written for one device, and the plans by which their layers are cut."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

__all__ = ["NETWORKS", "TOKENS", "VOCABULARY", "Network", "Task"]

VOCABULARY = 40
TOKENS = 16
WIDTH = 32
HEADS = 8


class Network(NamedTuple):
    """A network, and its plan.

    Attributes:
        make: Makes the network, with random weights. It computes numbers for each token from tokens.
        plan: The plan; None: that of transformers.
    """

    make: Callable[[], nn.Module]
    plan: Mapping[str, str] | None = None


class Task(L.LightningModule):
    """Trains a network to predict the same token again.

    Args:
        network: The network.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch of tokens."""
        outputs = self.network(batch)
        logits = getattr(outputs, "logits", outputs)
        return cross_entropy(logits.flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return gradient descent with momentum, which does not hide a factor of the gradients."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


# Written by hand


class Attention(nn.Module):
    """Attention whose heads may share keys and values.

    Args:
        shared: Number of heads that share keys and values. Default: 1.
    """

    def __init__(self, shared: int = 1) -> None:
        super().__init__()
        self.heads = HEADS
        self.groups = HEADS // shared
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH // shared)
        self.value = nn.Linear(WIDTH, WIDTH // shared)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        query = self.query(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key = self.key(hidden).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        value = self.value(hidden).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.output(attended.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A perceptron with a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        return self.down(silu(self.gate(hidden)) * self.up(hidden))


class Block(nn.Module):
    """Attention and a perceptron, each with a norm and a residual.

    Args:
        attention: The attention.
        perceptron: The perceptron.
    """

    def __init__(self, attention: nn.Module, perceptron: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.perceptron = perceptron
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the same shape."""
        hidden = hidden + self.attention(self.norms[0](hidden))
        return hidden + self.perceptron(self.norms[1](hidden))


def plain() -> nn.Module:
    """Return blocks as those of GPT."""
    perceptrons = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(2)]
    blocks = [Block(Attention(), perceptron) for perceptron in perceptrons]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))


def gated() -> nn.Module:
    """Return blocks with a gate and shared keys and values."""
    blocks = [Block(Attention(shared=2), Gated()) for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))


def encoder() -> nn.Module:
    """Return torch's encoder layers."""
    layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))


ATTENTION = {
    "**.attention.query": "colwise",
    "**.attention.key": "colwise",
    "**.attention.value": "colwise",
    "**.attention.output": "rowwise",
    "**.attention.heads": "divided",
    "**.attention.groups": "divided",
}


# Of transformers


def of_transformers(kind: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a small model of transformers.

    Args:
        kind: Its class.
        options: Arguments of its configuration.
    """

    def make() -> nn.Module:
        import transformers

        model_class = getattr(transformers, kind)
        configuration = model_class.config_class(**options)
        model: nn.Module = model_class(configuration)
        return model

    return make


SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 2 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
}
DECODER = {**SIZES, "num_key_value_heads": 4, "use_cache": False, "pad_token_id": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}

NETWORKS: dict[str, Network] = {
    "encoder layers of torch": Network(encoder, {"network.*.linear1": "colwise", "network.*.linear2": "rowwise"}),
    "as GPT": Network(plain, {**ATTENTION, "**.perceptron.0": "colwise", "**.perceptron.2": "rowwise"}),
    "shared keys, gated": Network(gated, {**ATTENTION, "**.gate": "colwise", "**.up": "colwise", "**.down": "rowwise"}),
    "Llama": Network(of_transformers("LlamaForCausalLM", **DECODER)),
    "Mistral": Network(of_transformers("MistralForCausalLM", **DECODER)),
    "Qwen2": Network(of_transformers("Qwen2ForCausalLM", **DECODER)),
    "Qwen3": Network(of_transformers("Qwen3ForCausalLM", **DECODER, head_dim=4)),
    "BERT": Network(
        of_transformers("BertForMaskedLM", **SIZES, **NO_DROPOUT),
        {"**.layer.*.intermediate.dense": "colwise", "**.layer.*.output.dense": "rowwise"},
    ),
    "GPT-2": Network(
        of_transformers("GPT2LMHeadModel", n_embd=WIDTH, n_layer=2, n_head=HEADS, vocab_size=VOCABULARY, **GPT2),
        {"**.mlp.c_fc": "colwise", "**.mlp.c_proj": "rowwise"},
    ),
}
