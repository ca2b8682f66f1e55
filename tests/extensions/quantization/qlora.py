"""Small networks with random weights, of which LoRA trains adapters: for tests of quantised base weights."""

from typing import Any

import lightning as L
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 64


def llama() -> nn.Module:
    """Return a Llama of two layers, 64 wide. It normalises in float32."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation="eager",
            use_cache=False,
        )
    )


class Block(nn.Module):
    """A residual block of two layers with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)

    def forward(self, features: Tensor) -> Tensor:
        return features + self.down(torch.tanh(self.up(self.norm(features))))


def blocks() -> nn.Module:
    """Return a network of blocks that computes in whatever dtype it has."""
    return nn.Sequential(nn.Embedding(VOCABULARY, 64), Block(), Block(), nn.Linear(64, VOCABULARY))


class QLoRA(L.LightningModule):
    """A network with adapters of rank 4 at its linear layers.

    Args:
        build: Builds the base model.
        targets: The layers that have adapters.
        seed: Of all values.
    """

    def __init__(self, build: Any = blocks, targets: Any = ("up", "down"), seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = LoraConfig(r=4, target_modules=targets, init_lora_weights="gaussian")
        self.model = get_peft_model(build(), config)

    def forward(self, tokens: Tensor) -> Tensor:
        output = self.model(tokens)
        return output if isinstance(output, Tensor) else output.logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        logits = self(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam((p for p in self.parameters() if p.requires_grad), lr=0.01)


class Full(QLoRA):
    """Trains the base model as well; notes the classes of its layers in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(True)
        self.kinds: dict[str, str] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kinds = {name: type(part).__name__ for name, part in self.named_modules()}
        return super().training_step(batch, batch_idx)


def qllama() -> QLoRA:
    """Return a Llama with adapters at all linear layers but the head."""
    return QLoRA(llama, "all-linear")


def tokens(size: int = 8, batches: int = 3) -> DataLoader[Any]:
    """Return batches of random tokens, (size, 9)."""
    samples = torch.randint(VOCABULARY, (size * batches, 9), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(samples), batch_size=size)


def adapters(module: nn.Module) -> dict[str, Tensor]:
    """Return the trained weights."""
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def stored(module: nn.Module) -> dict[str, Tensor]:
    """Return the frozen weights as they are stored."""
    return {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}


def difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between trained weights."""
    others = adapters(other)
    return max(float((value - others[name]).abs().max()) for name, value in adapters(one).items())
