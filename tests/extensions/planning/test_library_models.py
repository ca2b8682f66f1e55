"""Models of transformers from their configurations: predicted against real steps. Skipped without the package."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.tracing.tracer import trace_step
from tests.extensions.planning.steps import Step, peak_of, recorded_really

# Before the package reads it: models are built from their configurations alone.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


class Scores(nn.Module):
    """A language model, which returns its scores alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=tokens).logits
        return scores


def llama() -> Step:
    return Step(Scores(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False))))


def test_the_peak_of_a_real_step() -> None:
    example = torch.zeros(4, 12, dtype=torch.int64)
    settings = StepSettings()
    found = trace_step(llama, example, settings)
    for batch_size in (2, 7):
        actual = peak_of(recorded_really(llama(), example, batch_size, settings))
        assert found.peak(batch_size).nbytes == pytest.approx(actual, rel=0.01)
