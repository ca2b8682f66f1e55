"""Networks without a plan: how much is found to be cut over two processes, and the difference to one device."""

import argparse
import re
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.device_mesh.networks import (
    DECODER,
    GPT2,
    HEADS,
    NO_DROPOUT,
    SIZES,
    TOKENS,
    VOCABULARY,
    WIDTH,
    encoder,
    gated,
    of_transformers,
    plain,
)
from equipoise import ConfigurationError, FSDPStrategy, Trainer
from equipoise.extensions.fsdp.mesh.grid import is_cut

STEPS = 10
BATCH = 4
CLASSES = 10
MELS = 8


class Task(L.LightningModule):
    """Trains a network on tokens, or on what is drawn from them.

    Args:
        network: The network.
        inputs: Returns its arguments for a batch of tokens.
    """

    def __init__(self, network: nn.Module, inputs: Callable[[Tensor], dict[str, Tensor]]) -> None:
        super().__init__()
        self.network = network
        self.inputs = inputs

    def training_step(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch."""
        outputs = self.network(**self.inputs(batch))
        if isinstance(outputs, Tensor):
            return cross_entropy(outputs.flatten(0, 1), batch.flatten())
        loss: Tensor = outputs.loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return gradient descent with momentum, which does not hide a factor of the gradients."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def plainly(tokens: Tensor) -> dict[str, Tensor]:
    """Return the arguments of torch's containers."""
    return {"input": tokens}


def as_text(tokens: Tensor) -> dict[str, Tensor]:
    """Return the arguments of language models."""
    return {"input_ids": tokens, "labels": tokens}


def as_images(tokens: Tensor) -> dict[str, Tensor]:
    """Return images and their classes."""
    waves = torch.arange(1, 49, dtype=torch.float64)
    pixels = torch.sin(tokens.unsqueeze(-1) * waves)
    return {"pixel_values": pixels.reshape(-1, 3, TOKENS, TOKENS), "labels": tokens[:, 0] % CLASSES}


def as_speech(tokens: Tensor) -> dict[str, Tensor]:
    """Return features of sounds, and their text."""
    waves = torch.arange(1, MELS + 1, dtype=torch.float64)
    features = torch.sin(tokens.unsqueeze(1) * waves.unsqueeze(-1))
    return {"input_features": features, "labels": tokens}


def without_plan(kind: str, **options: Any) -> Callable[[], nn.Module]:
    """Return a function that makes a model of transformers without the plan that transformers has for it."""
    make = of_transformers(kind, **options)

    def make_without() -> nn.Module:
        model = make()
        for part in model.modules():
            if hasattr(part, "_tp_plan"):
                vars(part)["_tp_plan"] = {}
        return model

    return make_without


T5 = {
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": 2 * WIDTH,
    "num_layers": 2,
    "num_heads": HEADS,
    "vocab_size": VOCABULARY,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
VIT = {**SIZES, **NO_DROPOUT, "image_size": TOKENS, "patch_size": 4, "num_labels": CLASSES}
WHISPER = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 2 * WIDTH,
    "decoder_ffn_dim": 2 * WIDTH,
    "vocab_size": VOCABULARY,
    "num_mel_bins": MELS,
    "max_source_positions": TOKENS // 2,
    "max_target_positions": 2 * TOKENS,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "use_cache": False,
}
SMALL_GPT2 = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "vocab_size": VOCABULARY, **GPT2}

NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], dict[str, Tensor]]]] = {
    "encoder layers of torch": (encoder, plainly),
    "as GPT": (plain, plainly),
    "shared keys, gated": (gated, plainly),
    "Llama": (without_plan("LlamaForCausalLM", **DECODER), as_text),
    "Qwen3": (without_plan("Qwen3ForCausalLM", **DECODER, head_dim=4), as_text),
    "BERT": (of_transformers("BertForMaskedLM", **SIZES, **NO_DROPOUT), as_text),
    "ViT": (of_transformers("ViTForImageClassification", **VIT), as_images),
    "T5": (of_transformers("T5ForConditionalGeneration", **T5), as_text),
    "Whisper": (of_transformers("WhisperForConditionalGeneration", **WHISPER), as_speech),
    "GPT-2": (of_transformers("GPT2LMHeadModel", **SMALL_GPT2), as_text),
}


class CutLayers(Callback):
    """Notes which layers are cut.

    Attributes:
        names: The names of their weights, with * in the place of numbers.
        share: Which part of all elements of the parameters they have.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.share = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Note them."""
        cut = {name: parameter for name, parameter in pl_module.named_parameters() if is_cut(parameter)}
        patterns = (re.sub(r"\.\d+\.", ".*.", name) for name in cut if name.endswith(".weight"))
        self.names = list(dict.fromkeys(name.removeprefix("network.").removesuffix(".weight") for name in patterns))
        total = sum(parameter.numel() for parameter in pl_module.parameters())
        self.share = sum(parameter.numel() for parameter in cut.values()) / total


def fit(task: Task, callback: CutLayers, **options: Any) -> dict[str, Tensor]:
    """Train for ten steps in float64, and return the weights."""
    draw = torch.Generator().manual_seed(1)
    samples = torch.randint(1, VOCABULARY, (STEPS * BATCH, TOKENS), generator=draw)
    trainer = Trainer(
        precision="64-true",
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(task, DataLoader(list(samples), batch_size=BATCH))  # type: ignore[arg-type]
    return {name: parameter.detach() for name, parameter in task.named_parameters()}


def row_of(name: str) -> str:
    """Return a line of the table: what is found, and the largest difference of a weight."""
    make, inputs = NETWORKS[name]
    torch.manual_seed(3)
    task = Task(make(), inputs)
    for parameter in task.parameters():
        nn.init.normal_(parameter, std=0.2)
    expected = fit(deepcopy(task), CutLayers(), strategy="single_device", devices=["cpu"])
    layers = CutLayers()
    try:
        weights = fit(task, layers, strategy=FSDPStrategy(tensor=2, timeout=300.0), devices=["cpu"] * 2)
    except ConfigurationError as error:
        return f"| {name} | refused: {str(error).split('. ')[0]} | | |"
    largest = max(float((weight - expected[name]).abs().max()) for name, weight in weights.items())
    return f"| {name} | {', '.join(layers.names)} | {layers.share:.0%} | {largest:.1e} |"


def main() -> None:
    """Find plans, train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=[*NETWORKS], default=[*NETWORKS], help="default: all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| network | cut layers | of all parameters | difference |\n| --- | --- | --- | --- |")
    for name in options.networks:
        print(row_of(name), flush=True)


if __name__ == "__main__":
    main()
