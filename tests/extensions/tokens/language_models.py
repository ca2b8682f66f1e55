"""Small language models of transformers, in float64."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.extensions.tokens.sequences import WORDS

__all__ = ["language_model", "summed_loss"]


def language_model(name: str, implementation: str) -> Any:
    """Return "llama" or "gpt2", with an implementation of attention."""
    import transformers

    configurations: dict[str, Any] = {
        "llama": lambda: transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=WORDS,
        ),
        "gpt2": lambda: transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=WORDS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        ),
    }
    torch.manual_seed(3)
    config = configurations[name]()
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double()


def summed_loss(net: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss of a model of transformers, which computes it in float32, here in float64."""
    logits = net(**batch, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:], reduction="sum")
