"""Throughput of batches by tokens beside padded batches of a fixed count, on real text; see README.md."""

import argparse
import logging
import os
import time
import warnings
from collections import Counter
from pathlib import Path
from statistics import mean
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from equipoise import PackedCollate, TokenBatchSampler, Trainer

LEAST_THROUGHPUT = {"by tokens, padded": 1.5, "by tokens, packed": 1.5}
"""The bounds: tokens a second, against padded batches of a fixed count."""

DATA = Path(os.environ.get("EQUIPOISE_TEST_DATA", "")) / "wikitext-2"
LONGEST, COUNT, WORDS = 256, 16, 2000
"""Words of a paragraph at most, paragraphs of a batch of fixed count, and words of the vocabulary."""

BUDGET = LONGEST * COUNT
"""Tokens of a batch: as many as the largest batch of fixed count has, padding included."""


def paragraphs() -> list[Tensor]:
    """Return the paragraphs and headings of Wikipedia's articles as numbers of words; 0 stands for padding."""
    lines = [line.split() for line in (DATA / "valid.txt").read_text(encoding="utf-8").splitlines()]
    texts = [line[:LONGEST] for line in lines if len(line) > 1]
    common = Counter(word for text in texts for word in text).most_common(WORDS - 2)
    numbers = {word: number for number, (word, _) in enumerate(common, start=2)}
    return [torch.tensor([numbers.get(word, 1) for word in text]) for text in texts]


def padded(samples: list[Tensor]) -> dict[str, Tensor]:
    """Return a padded batch; its labels leave out the padding."""
    tokens = pad_sequence(samples, batch_first=True)
    labels = pad_sequence(samples, batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "attention_mask": (labels != -100).long(), "labels": labels}


class LanguageModel(L.LightningModule):
    """A small GPT-2. It counts real and computed tokens, and takes the time of an epoch's batches."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=WORDS, n_positions=LONGEST, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1
        )
        self.net = GPT2LMHeadModel(config)
        self.real = self.computed = self.steps = self.largest = 0

    def on_train_epoch_start(self) -> None:
        self.begin = time.process_time()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        size = batch["input_ids"].numel()
        self.computed += size
        self.largest = max(self.largest, size)
        self.real += int((batch["input_ids"] != 0).sum())
        self.steps += 1
        count = (batch["labels"][:, 1:] != -100).sum()
        logits = self.net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        return {"loss": loss, "loss_weight": count}

    def on_train_epoch_end(self) -> None:
        self.seconds = time.process_time() - self.begin

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loaders(data: list[Tensor]) -> dict[str, Any]:
    """Return a function that makes the loader of each way."""
    lengths = [len(sample) for sample in data]
    by_longest = TokenBatchSampler(lengths, BUDGET)
    by_sum = TokenBatchSampler(lengths, BUDGET, padded=False, row_tokens=LONGEST)
    return {
        "fixed count, padded": lambda: DataLoader(data, COUNT, shuffle=True, collate_fn=padded),
        "by tokens, padded": lambda: DataLoader(data, batch_sampler=by_longest, collate_fn=padded),
        "by tokens, packed": lambda: DataLoader(data, batch_sampler=by_sum, collate_fn=PackedCollate(LONGEST)),
    }


def run(loader: Any, seed: int) -> LanguageModel:
    """Return the module after an epoch."""
    torch.manual_seed(seed)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = LanguageModel()
    Trainer(accelerator="cpu", devices=1, max_epochs=1, enable_model_summary=False, **quiet).fit(module, loader)
    return module


def main() -> int:
    """Print the table, and return 1 if `--check` is given and a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="number of epochs of each way; default: 3")
    parser.add_argument("--check", action="store_true", help="fail if a bound is not kept")
    arguments = parser.parse_args()
    if not DATA.is_dir():
        print("EQUIPOISE_TEST_DATA names no folder with wikitext-2/ in it: nothing is measured.")
        return 0
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    data = paragraphs()
    ways = loaders(data)
    runs = {name: [run(make(), seed) for seed in range(arguments.repeats)] for name, make in ways.items()}
    throughputs = {name: mean(module.real / module.seconds for module in modules) for name, modules in runs.items()}
    base = throughputs["fixed count, padded"]
    table = Table(title=f"WikiText-2, {len(data)} paragraphs, {arguments.repeats} epochs each")
    for column in ("", "steps", "largest batch, tokens", "padding", "tokens a second", "times"):
        table.add_column(column)
    for name, modules in runs.items():
        padding = 1 - mean(module.real / module.computed for module in modules)
        steps = mean(module.steps for module in modules)
        largest = max(module.largest for module in modules)
        speed = throughputs[name]
        table.add_row(name, f"{steps:.0f}", f"{largest}", f"{padding:.1%}", f"{speed:.0f}", f"{speed / base:.2f}")
    Console(width=120).print(table)
    is_quick = all(throughputs[name] / base >= bound for name, bound in LEAST_THROUGHPUT.items())
    return int(arguments.check and not is_quick)


if __name__ == "__main__":
    raise SystemExit(main())
