"""Small random models of transformers have the same weights with compiled blocks as with eager ones on one device."""

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import Trainer
from tests.extensions.compiled.blocks.networks import AOT
from tests.extensions.fsdp.programs import QUIET, assert_close, in_processes, weights_of

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

TOKENS = 60
SMALL: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1, use_cache=False))


def bert() -> Any:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **no_dropout))


def gpt2() -> Any:
    sizes = {"vocab_size": TOKENS, "n_embd": 16, "n_layer": 3, "n_head": 2}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, use_cache=False))


def distilbert() -> Any:
    sizes = {"vocab_size": TOKENS, "dim": 16, "hidden_dim": 24, "n_layers": 3, "n_heads": 2}
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0}
    return transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**sizes, **no_dropout))


def neox() -> Any:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL, use_cache=False))


# The layers of these compute in float64 throughout, so they are compiled with the compiler's own kernels.
MODELS: dict[Callable[[], Any], Any] = {bert: True, distilbert: True, gpt2: True, neox: True, llama: AOT}


class Language(L.LightningModule):
    """Predicts the next token."""

    def __init__(self, build: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model = build()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        scores = self.model(input_ids=tokens).logits[:, :-1]
        return nn.functional.cross_entropy(scores.reshape(-1, TOKENS), tokens[:, 1:].reshape(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def trained(build: Callable[[], Any], strategy: str = "single_device", processes: int = 1, **options: Any) -> Any:
    """Return the weights after 20 steps of 8 sequences, and how many blocks were compiled."""
    draw = torch.Generator().manual_seed(3)
    sequences = torch.randint(TOKENS, (80, 10), generator=draw)
    together = strategy == "pipeline"
    loader = DataLoader(sequences, batch_size=8 if together else 8 // processes)  # type: ignore[arg-type]
    devices = ["cpu"] * processes
    trainer = Trainer(strategy=strategy, devices=devices, max_epochs=2, precision="64-true", **QUIET, **options)
    module = Language(build)
    trainer.fit(module, loader)
    return weights_of(module), trainer.run_state.summary_rows.get("compiled blocks", "")


def all_trained(strategy: str) -> list[Any]:
    return [trained(build, strategy, 2, compile=way) for build, way in MODELS.items()]


def check(strategy: str) -> None:
    found = all_trained(strategy) if strategy == "pipeline" else in_processes(2, partial(all_trained, strategy))
    for build, (weights, blocks) in zip(MODELS, found, strict=True):
        assert blocks == "3, by 1 programs", build
        assert_close(trained(build)[0], weights, 1e-10)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_are_those_of_one_device(strategy: str) -> None:
    check(strategy)


def check_whole_step() -> None:
    # The model's code sets a global variable, so the step is not one program.
    weights, blocks = trained(gpt2, compile=True)
    assert blocks == "3, by 1 programs"
    assert_close(trained(gpt2)[0], weights, 1e-10)


@pytest.mark.parametrize("call", ["check('pipeline')", "check_whole_step()"])
def test_weights_are_those_of_one_device_in_one_process(call: str) -> None:
    # The compiler sets a variable of the process's environment.
    command = f"from {__name__} import check, check_whole_step; {call}"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=500)
