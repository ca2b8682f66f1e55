"""Language models of transformers: padded and packed batches train the same weights, however they are divided."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from equipoise import BalancedDataParallelStrategy, OOMRecovery, PackedCollate, TokenBatchSampler
from tests.extensions.tokens.language_models import language_model, summed_loss
from tests.extensions.tokens.sequences import WORDS, tokens
from tests.support.equality import assert_equal
from tests.support.trainer_runs import trainer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

pytestmark = [pytest.mark.filterwarnings("ignore:Batch .* ran out of memory"), pytest.mark.slow]

LENGTHS = torch.randint(2, 40, (60,), generator=torch.Generator().manual_seed(5)).tolist()
DATA = [{"input_ids": sample.tolist()} for sample in tokens(LENGTHS)]


def padding() -> Any:
    vocabulary = {f"word{number}": number for number in range(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="word1"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="word0")
    return transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)


class LanguageModel(L.LightningModule):
    """GPT-2, since norms of Llama round to float32. The loss is a mean over the tokens that it predicts."""

    def __init__(self, most_rows: int = 1000) -> None:
        super().__init__()
        self.net = language_model("gpt2", "sdpa")
        self.most_rows = most_rows

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        if len(batch["labels"]) > self.most_rows:
            raise torch.OutOfMemoryError("injected")
        count = (batch["labels"][:, 1:] != -100).sum()
        return {"loss": summed_loss(self.net, batch) / count, "loss_weight": count}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)


RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one row": (PackedCollate, {"accumulate_grad_batches": 2}),
    "FlashAttention's way": (lambda: PackedCollate(attention="positions"), {"accumulate_grad_batches": 2}),
    "ddp": (PackedCollate, {"strategy": "ddp", "devices": 2}),
    "ddp, padded": (padding, {"strategy": "ddp", "devices": 2}),
    "balanced": (
        lambda: PackedCollate(40),
        {"strategy": BalancedDataParallelStrategy(), "devices": 2, "accumulate_grad_batches": 2},
    ),
    "micro-batches": (lambda: PackedCollate(40), {"callbacks": [OOMRecovery()], "accumulate_grad_batches": 2}),
}


def trained(collate: Any, most_rows: int = 1000, **options: Any) -> list[Tensor]:
    """Return the weights after two epochs. The batches have the same samples, whatever the collate function is."""
    module = LanguageModel(most_rows)
    loader = DataLoader(DATA, batch_sampler=TokenBatchSampler(LENGTHS, 160), collate_fn=collate)
    trainer(max_epochs=2, precision="64-true", **options).fit(module, loader)
    return [parameter.detach() for parameter in module.parameters()]


@pytest.fixture(scope="module")
def padded_weights() -> list[Tensor]:
    return trained(padding(), accumulate_grad_batches=2)


@pytest.mark.parametrize("name", RUNS)
def test_packed_batches_train_as_padded_ones(name: str, padded_weights: list[Tensor]) -> None:
    collate, options = RUNS[name]
    most_rows = 2 if name == "micro-batches" else 1000
    assert_equal(padded_weights, trained(collate(), most_rows, **options), 1e-10)
