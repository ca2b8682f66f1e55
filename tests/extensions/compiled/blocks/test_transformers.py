"""Small random models of transformers have the same weights with compiled blocks as with eager ones on one device."""

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
from tests.support.programs import Program

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


def neox() -> Any:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL, use_cache=False))


# The strategy under which each is compiled with the compiler's own kernels, which take long; under the others without
# any. The layers of llama do not compute in float64 throughout, so that it has no kernels.
MODELS: dict[Callable[[], Any], str] = {bert: "ddp", gpt2: "pipeline", neox: "fsdp", llama: ""}


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
    """Return the weights after 10 steps of 8 sequences; all blocks were compiled, if any was to be."""
    sequences = torch.randint(TOKENS, (40, 10), generator=torch.Generator().manual_seed(3))
    loader = DataLoader(sequences, batch_size=8 if strategy == "pipeline" else 8 // processes)  # type: ignore[arg-type]
    options = {"max_epochs": 2, "precision": "64-true", **QUIET, **options}
    trainer = Trainer(strategy=strategy, devices=["cpu"] * processes, **options)
    module = Language(build)
    trainer.fit(module, loader)
    assert "compile" not in options or trainer.run_state.summary_rows["compiled blocks"] == "3, by 1 programs"
    return weights_of(module)


def way_of(build: Callable[[], Any], strategy: str) -> Any:
    return True if MODELS[build] == strategy else AOT


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_weights_in_processes_are_those_of_one_device(strategy: str) -> None:
    calls = {build.__name__: partial(trained, build, strategy, 2, compile=way_of(build, strategy)) for build in MODELS}
    assert_same_in_processes(2, {build.__name__: partial(trained, build) for build in MODELS}, calls, 1e-10)


def check() -> None:
    """Compare the models under the pipeline, and one on one device with kernels."""
    for build in MODELS:
        expected = trained(build)
        assert_close(expected, trained(build, "pipeline", 2, compile=way_of(build, "pipeline")), 1e-10)
        if build is gpt2:
            # Its code sets a global variable, so that its step is not one program.
            assert_close(expected, trained(build, compile=True), 1e-10)


def test_weights_in_one_process_are_those_of_one_device() -> None:
    # The compiler sets a variable of the process's environment.
    with Program(f"from {__name__} import check; check()") as program:
        _, complaints = program.finish()
        assert program.returncode == 0, complaints
