"""Networks that were written for one device, and the plans by which their layers are cut."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

__all__ = ["NETWORKS", "Network", "Task"]

VOCABULARY = 40
TOKENS = 16
WIDTH = 32
HEADS = 8
PATCH = 4
CLASSES = 10
MELS = 6
FRAMES = 24


def tokens(draw: torch.Generator) -> dict[str, Tensor]:
    """Return random tokens."""
    drawn = torch.randint(1, VOCABULARY, (TOKENS,), generator=draw)
    return {"input_ids": drawn, "labels": drawn}


def image(draw: torch.Generator) -> dict[str, Tensor]:
    """Return an image of noise and a class."""
    pixels = torch.randn(3, 4 * PATCH, 4 * PATCH, generator=draw, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (), generator=draw)}


def speech(draw: torch.Generator) -> dict[str, Tensor]:
    """Return features over time as those of speech, and tokens."""
    features = torch.randn(MELS, 2 * FRAMES, generator=draw, dtype=torch.float64)
    drawn = torch.randint(1, VOCABULARY, (TOKENS,), generator=draw)
    return {"input_features": features, "decoder_input_ids": drawn, "labels": drawn}


def pair(draw: torch.Generator) -> dict[str, Tensor]:
    """Return tokens to read and tokens to write."""
    source, target = torch.randint(1, VOCABULARY, (2, TOKENS), generator=draw)
    return {"input_ids": source, "decoder_input_ids": target, "labels": target}


class Network(NamedTuple):
    """A network, its plan, and what it learns from.

    Attributes:
        make: Makes the network, with random weights. It computes numbers for each label from its inputs.
        plan: The plan; None: that of transformers.
        draw: Draws the inputs of a sample by name, and its labels. Default: tokens, which are the labels as well.
        blocks: Lists of blocks between which sequences are divided. Default: None, those of the batch are.
    """

    make: Callable[[], nn.Module]
    plan: Mapping[str, str] | None = None
    draw: Callable[[torch.Generator], dict[str, Tensor]] = tokens
    blocks: Sequence[str] | None = None


class Task(L.LightningModule):
    """Trains a network to predict labels.

    Args:
        network: The network.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        first, *names = [name for name in batch if name != "labels"]
        more = {name: batch[name] for name in names}
        outputs = self.network(batch[first], **more)
        logits = getattr(outputs, "logits", outputs)
        return cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())

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

VIT = {"image_size": 4 * PATCH, "patch_size": PATCH, "num_labels": CLASSES}
SPEECH = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "num_mel_bins": MELS,
    "max_source_positions": FRAMES,
    "max_target_positions": TOKENS,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "dropout": 0.0,
    "use_cache": False,
}
T5 = {
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": 2 * WIDTH,
    "num_layers": 2,
    "num_heads": HEADS,
    "vocab_size": VOCABULARY,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "use_cache": False,
}
PROJECTIONS = {f"**.{name}_proj": "colwise" for name in "qkv"}
PERCEPTRON = {"**.fc1": "colwise", "**.fc2": "rowwise"}
T5_PLAN = {
    **{f"**.{name}": "colwise" for name in "qkv"},
    "**.o": "rowwise",
    "**.relative_attention_bias": "colwise",
    "**.n_heads": "divided",
    "**.wi": "colwise",
    "**.wo": "rowwise",
}

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
    "ViT": Network(
        of_transformers("ViTForImageClassification", **SIZES, **NO_DROPOUT, **VIT),
        {**PROJECTIONS, **PERCEPTRON, "**.o_proj": "rowwise"},
        image,
        ["network.vit.layers"],
    ),
    "Whisper": Network(
        of_transformers("WhisperForConditionalGeneration", **SPEECH),
        {**PROJECTIONS, **PERCEPTRON, "**.out_proj": "rowwise", "**.num_heads": "divided"},
        speech,
        ["**.layers"],
    ),
    "T5": Network(of_transformers("T5ForConditionalGeneration", **T5), T5_PLAN, pair, ["network.encoder.block"]),
}
