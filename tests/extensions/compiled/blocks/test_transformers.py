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
from tests.extensions.fsdp.programs import QUIET, assert_close, assert_same_in_processes, weights_of

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
    """Return the weights after 20 steps of 8 sequences; all blocks were compiled, if any was to be."""
    sequences = torch.randint(TOKENS, (80, 10), generator=torch.Generator().manual_seed(3))
    loader = DataLoader(sequences, batch_size=8 if strategy == "pipeline" else 8 // processes)  # type: ignore[arg-type]
    options = {"max_epochs": 2, "precision": "64-true", **QUIET, **options}
    trainer = Trainer(strategy=strategy, devices=["cpu"] * processes, **options)
    module = Language(build)
    trainer.fit(module, loader)
    assert "compile" not in options or trainer.run_state.summary_rows["compiled blocks"] == "3, by 1 programs"
    return weights_of(module)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_in_processes_are_those_of_one_device(strategy: str) -> None:
    calls = {build.__name__: partial(trained, build, strategy, 2, compile=way) for build, way in MODELS.items()}
    assert_same_in_processes(2, {build.__name__: partial(trained, build) for build in MODELS}, calls, 1e-10)


def check(strategy: str, processes: int, *names: str) -> None:
    for build, way in MODELS.items():
        if not names or build.__name__ in names:
            # The code of GPT-2 sets a global variable, so that its step is not one program.
            found = trained(build, strategy, processes, compile=True if processes == 1 else way)
            assert_close(trained(build), found, 1e-10)


@pytest.mark.parametrize("call", ["check('pipeline', 2)", "check('single_device', 1, 'gpt2')"])
def test_weights_in_one_process_are_those_of_one_device(call: str) -> None:
    # The compiler sets a variable of the process's environment.
    command = f"from {__name__} import check; {call}"
    subprocess.run([sys.executable, "-c", command], check=True, timeout=500)
