"""`equipoise plan` with a budget of tokens: the largest one that fits, for the longest samples and for the most."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from equipoise import ConfigurationError, PackedCollate, TokenBatchSampler, predict_memory
from equipoise.extensions.common import bench
from equipoise.extensions.planning.description.settings import StepSettings
from equipoise.extensions.planning.tracing.planned_batches import planned_batches
from equipoise.extensions.planning.tracing.tracer import trace_step
from tests.extensions.planning.steps import Step
from tests.extensions.tokens.sequences import padded
from tests.support.bounded_calls import call_here
from tests.support.commands import equipoise, no_trace
from tests.support.projects import project_in

__all__ = ["equipoise", "no_trace"]

FILES = {
    "conf/config.yaml": """
        defaults: [equipoise, _self_, module: net, data: texts]
        trainer: {accelerator: cpu, max_epochs: 1}
        """,
    "conf/module/net.yaml": "{_target_: texts.module.Net}",
    "conf/data/texts.yaml": "{_target_: texts.module.Texts, max_tokens: 512}",
    "texts/__init__.py": "",
    "texts/module.py": """
        import torch
        from lightning.pytorch import LightningDataModule, LightningModule
        from torch import nn
        from torch.nn.utils.rnn import pad_sequence
        from torch.utils.data import DataLoader

        from equipoise import TokenBatchSampler

        LENGTHS = [100] * 100 + [30] * 200 + [4] * 3000
        DATA = [torch.full((length,), 7) for length in LENGTHS]

        def padded(samples):
            return pad_sequence(samples, batch_first=True)

        class Net(LightningModule):
            # Scores of attention grow with the square of the length, `summary` with the samples.
            def __init__(self):
                super().__init__()
                self.words = nn.Embedding(50, 16)
                self.out = nn.Linear(16, 50)
                self.summary = nn.Linear(16, 2000)

            def training_step(self, batch, batch_idx):
                values = self.words(batch)
                values = torch.softmax(values @ values.mT, -1) @ values
                losses = self.out(values).square().mean() + self.summary(values.mean(1)).square().mean()
                return {"loss": losses, "loss_weight": torch.tensor(batch.numel())}

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())

        class Texts(LightningDataModule):
            def __init__(self, max_tokens):
                super().__init__()
                self.max_tokens = max_tokens

            def train_dataloader(self):
                sampler = TokenBatchSampler(LENGTHS, self.max_tokens)
                return DataLoader(DATA, batch_sampler=sampler, collate_fn=padded)
        """,
}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, equipoise: Any) -> Any:
    """A function that returns the plan for a budget of tokens and a device."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(bench, "call_bounded", call_here)

    def run(max_tokens: int, device: str, *arguments: str) -> Any:
        code, out, err = equipoise("plan", f"data.max_tokens={max_tokens}", f"trainer.devices={device}", *arguments)
        assert code == 0, err
        return json.loads(out) if "--json" in arguments else out

    with project_in(tmp_path, FILES, "texts"):
        yield run


def alone(plan: Any) -> Any:
    (entry,) = [entry for entry in plan["strategies"] if entry["strategy"] == "single_device"]
    return entry


@pytest.mark.slow
def test_the_largest_budget_fits_with_every_batch(plan: Any) -> None:
    """Against predictions for the real batches of the sampler; 5% more do not fit."""
    device = "552MiB"
    entry = alone(plan(512, device, "--json"))
    budget = entry["largest_batch"]
    usable = entry["devices"][0]["usable"]
    assert budget > 2 * 512
    import texts.module as made  # type: ignore[import-not-found]

    def peaks(max_tokens: int) -> list[int]:
        batches = list(TokenBatchSampler(made.LENGTHS, max_tokens, shuffle=False))
        shapes = {(len(batch), max(made.LENGTHS[index] for index in batch)) for batch in batches}
        found = []
        for rows, width in sorted(shapes):
            example = torch.zeros(rows, width, dtype=torch.int64)
            found.append(trace_step(made.Net, example, StepSettings(device="cuda")).peak(rows, rounding=512).nbytes)
        return found

    assert max(peaks(budget)) <= usable < max(peaks(round(1.05 * budget)))
    assert alone(plan(budget, device, "--json"))["fits"]
    assert not alone(plan(round(1.05 * budget), device, "--json"))["fits"]


@pytest.mark.slow
def test_the_table_and_what_helps_if_nothing_fits(plan: Any) -> None:
    budget = alone(plan(512, "552MiB", "--json"))["largest_batch"]
    assert f"{budget} tokens" in plan(512, "552MiB")
    more = plan(3 * budget, "552MiB")
    assert "Batches have a budget of tokens" in more
    assert "does not fit" in more
    changes = more.split("make a step of as many or more")[1]
    # Gradients that are accumulated live longer, so the budget is smaller.
    fitting = int(changes.split("data.max_tokens=")[1].split()[0])
    assert 0.5 * budget < fitting <= budget
    assert f"trainer.accumulate_grad_batches={-(-3 * budget // fitting)}" in changes
    assert alone(plan(fitting, "552MiB", "--json", "trainer.accumulate_grad_batches=4"))["fits"]


def shapes(loader: Any) -> list[list[int]]:
    return [list(batch.shape) for batch in planned_batches(loader).batches]


def test_the_longest_samples_and_the_most_are_planned() -> None:
    lengths = [40] * 3 + [3] * 50 + [20] * 5
    data = [torch.ones(length, dtype=torch.int64) for length in lengths]

    # 1. Padded: the longest samples, and the most.
    loader = DataLoader(data, batch_sampler=TokenBatchSampler(lengths, 120), collate_fn=padded)
    assert shapes(loader) == [[3, 40], [40, 3]]
    assert planned_batches(loader).budget == 120
    assert planned_batches(loader).largest_budget([7, 100]) == 280
    assert planned_batches(loader).largest_budget([7, 13]) == 0
    # 2. Rows of packed samples.
    sampler = TokenBatchSampler(lengths, 120, padded=False, row_tokens=40)
    packed = planned_batches(DataLoader(data, batch_sampler=sampler, collate_fn=PackedCollate(40)))
    assert [list(batch["input_ids"].shape) for batch in packed.batches] == [[3, 40]]
    assert packed.row_tokens == [40]
    # 3. One row: its tokens are no number of rows.
    sampler = TokenBatchSampler(lengths, 120, padded=False)
    row = planned_batches(DataLoader(data, batch_sampler=sampler, collate_fn=PackedCollate()))
    assert list(row.batches[0]["input_ids"].shape) == [1, 120]
    assert row.budget is None
    # 4. Other loaders.
    assert shapes(DataLoader(torch.zeros(9, 2), batch_size=4)) == [[4, 2]]
    with pytest.raises(ConfigurationError, match="the loader is empty"):
        planned_batches([])


@pytest.mark.slow
def test_a_loader_is_planned_with_the_longest_samples() -> None:
    lengths = [2, 2, 2, 9, 9]
    data = [torch.ones(length, dtype=torch.int64) for length in lengths]
    sampler = TokenBatchSampler(lengths, 18)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=padded)
    module = Step(nn.Embedding(50, 16))
    expected = predict_memory(module, torch.ones(2, 9, dtype=torch.int64))
    found = predict_memory(module, loader)
    assert found.batch_size == 2
    assert found.peak().nbytes == expected.peak().nbytes
