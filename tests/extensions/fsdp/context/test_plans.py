"""Predicted peaks of processes that divide sequences, against those that the ledger records in real steps."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from equipoise import FSDPStrategy, MemoryLogger, Trainer, predict_memory
from equipoise.extensions.common.planned_devices import PlannedDevice
from equipoise.extensions.planning.comparison import StrategyPlan, plan_strategies
from tests.extensions.fsdp.context.networks import DECODER, POSITIONS, Gpt, Task, of_transformers
from tests.extensions.fsdp.programs import fsdp, in_processes
from tests.support.quiet import QUIET

LENGTH = 512
BATCH = 2


class Planned(Task):
    """A task whose step takes the number of the batch, and whose labels are not counted."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class Repeated(Gpt):
    """Blocks for longer sequences, whose positions have few embeddings."""

    def embed(self, batch: Any) -> Tensor:
        positions = batch["position_ids"] % POSITIONS
        return self.tokens(batch["input_ids"]) + self.positions(positions)


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "causal": (lambda: Planned(Repeated()), {}),
    "padded": (lambda: Planned(Repeated("padded")), {}),
    "computed again": (lambda: Planned(Repeated()), {"activation_checkpointing": ["network.blocks.*"]}),
    "Llama, padded": (of_transformers("LlamaForCausalLM", Planned, **DECODER, use_cache=False), {}),
}


def samples(count: int) -> list[dict[str, Tensor]]:
    """Sequences of which the first has padding."""
    draw, positions = torch.Generator().manual_seed(5), torch.arange(LENGTH)
    found = []
    for number in range(count):
        tokens = torch.randint(1, 20, (LENGTH,), generator=draw)
        seen = (positions == 0) | (positions > (number % BATCH == 0))
        found.append({"input_ids": tokens, "shift_labels": tokens, "position_ids": positions, "attention_mask": seen})
    return found


def recorded() -> list[int]:
    """Return the largest peak of the second step over the processes, for each case."""
    warnings.simplefilter("ignore")
    peaks = []
    for make, options in CASES.values():
        memory = MemoryLogger(detail="modules", leaks=False)
        strategy = fsdp(context=2, compare_layers=False)
        trainer = Trainer(strategy=strategy, devices=["cpu"] * 2, max_steps=2, callbacks=[memory], **QUIET, **options)
        trainer.fit(make(), DataLoader(samples(4 * BATCH), batch_size=BATCH))  # type: ignore[arg-type]
        peak = torch.tensor(max(composition.nbytes for composition in memory.compositions))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        peaks.append(int(peak))
    return peaks


def plan_of(make: Callable[[], nn.Module], devices: int = 2, **options: Any) -> StrategyPlan:
    batch = torch.utils.data.default_collate(samples(BATCH))
    module = make()
    prediction = predict_memory(module, batch, **options)
    places = [PlannedDevice(name="cpu", kind="cpu", memory=2**40)] * devices
    (plan,) = plan_strategies(prediction, module, [FSDPStrategy(context=2)], places)
    return plan


@pytest.mark.slow
def test_predicted_peaks_of_divided_sequences_are_those_of_real_steps() -> None:
    actual = in_processes(2, recorded)
    found = {}
    for (name, (make, options)), peak in zip(CASES.items(), actual, strict=True):
        plan = plan_of(make, **options)
        assert plan.reason is None
        assert plan.batches == 1
        found[name] = plan.devices[0].peak.nbytes / peak
    assert found == {name: pytest.approx(1, abs=0.01) for name in CASES}


def test_a_plan_with_processes_that_context_does_not_divide_has_a_reason() -> None:
    three = plan_of(CASES["causal"][0], devices=3)
    assert three.reason is not None
    assert "context=2" in three.reason
