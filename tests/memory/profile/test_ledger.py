"""The ledger against what is known to the byte, and against the peak that torch's profiler sees of the allocator."""

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from equipoise.memory.profile.ledger import Ledger
from tests.support.watched_steps import Build, convolution, held_before, mlp, optimizer_of, transformer, watched_step


def peak_of_allocator(step: Callable[[], None], folder: Path) -> int:
    """The most that the CPU's allocator had given out at a time, as the profiler saw it, above what was there."""
    gc.collect()  # what else goes in the midst of the step would count, too
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    finally:
        gc.enable()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    trace = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in trace if event.get("name") == "[memory]"]
    total = most = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        total += change
        most = max(most, total)
    return most


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("build", "kind"), [(mlp, "momentum"), (convolution, "adamw"), (transformer, "adamw")])
def test_the_peak_and_what_holds_it_are_those_of_the_allocator(build: Build, kind: str, tmp_path: Path) -> None:
    def step() -> None:
        module(batch).pow(2).mean().backward()
        optimizer.step()

    # 1. The allocator's peak.
    module, batch = build()
    optimizer = optimizer_of(module, kind)
    truth = peak_of_allocator(step, tmp_path)

    # 2. That of the ledger, in another step of the same network.
    module, batch = build()
    optimizer = optimizer_of(module, kind)
    ledger = Ledger(module, [optimizer])
    watched_step(ledger, module, optimizer, batch)
    peak = ledger.peak("cpu")
    assert peak.nbytes - held_before(peak) == pytest.approx(truth, rel=0.01)

    # 3. What is known to the byte.
    totals = ledger.peak("cpu", "optimizer step").totals()
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    known = {
        "parameter": module.parameters(),
        "gradient": module.parameters(),
        "optimizer state": states,
        "buffer": module.buffers(),
        "batch": [batch],
    }
    for category, tensors in known.items():
        assert totals.get(category, 0) == sum(tensor.nbytes for tensor in tensors), category


def test_holders_add_up_and_name_their_modules() -> None:
    module, batch = convolution()
    ledger = Ledger(module, [optimizer := optimizer_of(module, "adamw")])
    watched_step(ledger, module, optimizer, batch)
    for phase in ledger.phases():
        peak = ledger.peak("cpu", phase)
        sizes = [holder.nbytes for holder in peak.holders]
        assert sum(sizes) == peak.nbytes
        assert sizes == sorted(sizes, reverse=True)
    holders = ledger.peak("cpu", "forward").holders
    assert (holders[0].category, holders[0].shape, holders[0].dtype) == ("activation", (64, 32, 32, 32), "float32")
    assert {holder.module for holder in holders if holder.category == "activation"} >= {"0", "1", "2"}
    temporary = {holder.module for holder in ledger.peak("cpu", "backward").holders if holder.category == "temporary"}
    assert temporary >= {"5", "6"}  # a backward belongs to the modules of its forward
    categories = {holder.name: holder.category for holder in ledger.peak("cpu", "optimizer step").holders}
    assert categories["exp_avg of weight"] == "optimizer state"
    assert "activation" in str(ledger.peak("cpu"))


def test_activations_are_what_a_forward_leaves() -> None:
    kept: list[Tensor] = []
    ledger = Ledger(module := nn.Linear(10, 10))
    ledger.start()
    out = module(torch.ones(4, 10))
    kept.append(out.detach().clone())
    (out * 2.0).sum()
    ledger.begin("backward")
    ledger.stop()
    totals = ledger.peak("cpu", "backward").totals()
    # the input, which the graph keeps, the output and the copy; the product and the sum died
    assert totals["activation"] == 3 * out.nbytes


def test_views_of_what_was_there_before_are_not_new() -> None:
    table = torch.randn(1000, 8)
    ledger = Ledger(nn.Module())
    ledger.start()
    row = table[3]
    made = row + 1
    part = made[2:]
    ledger.stop()
    assert [(holder.name, holder.shape) for holder in ledger.peak("cpu").holders] == [("add", (8,))]
    assert part.shape == (6,)


def test_resized_and_empty_storages() -> None:
    ledger = Ledger(nn.Module())
    ledger.start()
    a = torch.empty(0)
    b = torch.ones(10)
    b.resize_(1000)
    b.add_(1)
    del a
    ledger.stop()
    assert ledger.peak("cpu").nbytes == 4000


def test_a_failing_forward_does_not_confuse_the_next() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no")

    module = nn.ModuleDict({"good": nn.Linear(2, 3), "bad": nn.Sequential(Fails())})
    ledger = Ledger(module)
    ledger.start()
    with pytest.raises(ValueError, match="no"):
        module["bad"](torch.ones(1, 2))
    out = module["good"](torch.ones(7, 2))
    ledger.stop()
    holder = next(holder for holder in ledger.peak("cpu").holders if holder.shape == tuple(out.shape))
    assert holder.module == "good"


def test_a_device_on_which_nothing_was_seen_is_an_error() -> None:
    ledger = Ledger(nn.Linear(2, 2))
    with pytest.raises(KeyError, match="Nothing was seen on cuda:0"):
        ledger.peak("cuda:0")
