"""`Efficiency`: counted operations against the formula, and values of runs on one device and in processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, IterableDataset

from equipoise import Efficiency, FSDPStrategy, OOMRecovery, PipelineStrategy
from equipoise.extensions.compiled.interop import compiling
from equipoise.extensions.efficiency import energy
from equipoise.extensions.efficiency.peaks import peak_of
from equipoise.extensions.efficiency.section import section
from tests.extensions.efficiency.runs import IN, OF_A_SAMPLE, Net, fitted, loader
from tests.support.trainer_runs import refuses


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.net(batch[0]).square().mean())
        optimizer.step()


class Tokens(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch["input_ids"].float()).square().mean()


class Closures(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=3, tolerance_grad=0, tolerance_change=0)


class Hungry(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return loss


class Skips(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        if self.trainer.current_epoch == 0 and batch_idx < 3:
            return None
        return super().training_step(batch, batch_idx)


class Sums(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return sum((each.square().sum() for each in self.parameters()), torch.zeros(()))


class SometimesText(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs = batch if isinstance(batch, torch.Tensor) else torch.ones(8, IN)
        return self.net(inputs).square().mean()


class TextLater(IterableDataset[Any]):
    """Eight batches in each epoch, and one more without a size from the second epoch on."""

    epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        for _ in range(8):
            yield torch.ones(8, IN)
        if self.epochs > 1:
            yield "text"


TOGETHER = "computes a batch in several processes together"
PLAN = {"net.0": ColwiseParallel(), "net.2": RowwiseParallel()}
SHARDS = {"strategy": FSDPStrategy(tensor=2, tensor_plan=PLAN), "devices": ["cpu", "cpu"]}
STAGES = {"strategy": PipelineStrategy(engine="processes", micro_batches=2), "devices": ["cpu", "cpu"]}


class TestOperations:
    @pytest.mark.parametrize("module", [Net, ByHand])
    @pytest.mark.parametrize("counted_step", [0, 1, 4])
    def test_operations_are_those_of_the_formula(self, module: type[Net], counted_step: int):
        callback = Efficiency(peak=1e6, counted_step=counted_step)
        # Batches of 8, 8, 8, 8 and 3 samples in each of two epochs.
        trainer = fitted(callback, module(), loader(35, 8))
        usage = callback.usage
        first_samples = {0: 24, 1: 24, 4: 35}[counted_step]
        assert usage.samples == 70 - first_samples
        assert usage.operations == usage.samples * OF_A_SAMPLE
        assert usage.values()["utilisation"] == pytest.approx(usage.operations / usage.seconds / 1e6)
        assert "share of the peak" in trainer.summary_rows

    @pytest.mark.thorough
    def test_two_processes_compute_twice_as_many(self):
        callback = Efficiency(peak=1e6)
        fitted(callback, Net(), loader(64, 4), devices=["cpu", "cpu"], strategy="ddp")
        usage = callback.usage
        assert usage.samples == 128 - 3 * 8
        assert usage.operations == usage.samples * OF_A_SAMPLE
        assert usage.peak == 2e6

    def test_a_compiled_run_has_one_eager_step(self, monkeypatch: pytest.MonkeyPatch):
        graphs: list[Any] = []

        def lower(graph: Any, inputs: Any, *options: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        monkeypatch.setattr(compiling, "_lower", lower)
        callback = Efficiency()
        fitted(callback, Net(), loader(40, 8), compile=True)
        torch.compiler.reset()
        assert graphs
        assert callback.usage.operations == 7 * 8 * OF_A_SAMPLE

    def test_a_batch_that_the_optimiser_computes_several_times(self):
        module = Closures()
        callback = Efficiency()
        fitted(callback, module, loader(40, 8))
        assert module.calls > 10
        # The counted step has as many calls as each of the others.
        assert callback.usage.operations == 7 * 8 * OF_A_SAMPLE * module.calls / 10

    def test_an_attempt_that_ran_out_of_memory_is_not_counted(self):
        callback = Efficiency()
        recovery = OOMRecovery()
        with pytest.warns(UserWarning, match="computed in 2 parts"):
            fitted(callback, Hungry(), loader(40, 8), callbacks=[callback, recovery])
        usage = callback.usage
        assert usage.samples == 7 * 8
        assert usage.operations == usage.samples * OF_A_SAMPLE

    def test_steps_without_a_loss_are_passed_over(self):
        callback = Efficiency()
        fitted(callback, Skips(), loader(40, 8))
        usage = callback.usage
        # The steps 0 to 2 have no loss, so the step 3 is counted, and is a first step.
        assert usage.samples == 6 * 8
        assert usage.operations == usage.samples * OF_A_SAMPLE

    @pytest.mark.parametrize(
        ("module", "options", "samples", "reason"),
        [
            # The last step that is tried is the sixth, and a first step.
            (Sums, {}, 32, "5 steps in turn"),
            (Sums, {"max_epochs": 1}, 0, "the run ended before"),
            (
                Net,
                {"strategy": "dp", "devices": ["cpu", "cpu"]},
                56,
                "strategy='dp' computes a step in several threads",
            ),
            pytest.param(Net, SHARDS, 56, f"strategy='fsdp' {TOGETHER}", marks=pytest.mark.thorough),
            pytest.param(Net, STAGES, 56, f"strategy='pipeline' {TOGETHER}", marks=pytest.mark.thorough),
        ],
    )
    def test_steps_whose_operations_are_not_counted(
        self, module: type[Net], options: dict[str, Any], samples: int, reason: str
    ):
        callback = Efficiency(peak=1e6)
        trainer = fitted(callback, module(), loader(40, 8), **options)
        assert callback.why_not_counted.startswith(reason)
        assert section(trainer, None).text.startswith(f"Operations were not counted: {reason}")
        assert callback.usage.operations == 0
        assert callback.usage.samples == samples


def test_tokens_and_logged_values():
    data = DataLoader([{"input_ids": torch.ones(IN, dtype=torch.long)} for _ in range(40)], batch_size=4)
    callback = Efficiency(log=True, peak=1e6)
    trainer = fitted(callback, Tokens(), data)
    assert callback.usage.tokens == (80 - 12) * IN
    names = {"samples_per_second", "tokens_per_second", "operations_per_second", "utilisation"}
    assert {name.removeprefix("efficiency/") for name in trainer.callback_metrics if "/" in name} >= names
    # Of the first epoch, the first steps are left out.
    assert [epoch.tokens for _, epoch in callback.history] == [28 * IN, 40 * IN]
    own = Efficiency(tokens=lambda batch: 7)
    fitted(own, Net(), loader(40, 8))
    assert own.usage.tokens == 7 * 7


def test_a_run_of_first_steps_alone_has_no_values():
    callback = Efficiency(peak=1e6)
    trainer = fitted(callback, Net(), loader(8, 8))
    assert callback.usage.values() == {}
    assert section(trainer, None) is not None


def test_epochs_within_the_first_steps():
    callback = Efficiency(peak=1e6)
    fitted(callback, Net(), loader(16, 8), max_epochs=4)
    assert [epoch.samples for _, epoch in callback.history] == [0, 8, 16, 16]
    assert [epoch.operations for _, epoch in callback.history] == [0, *(n * OF_A_SAMPLE for n in (8, 16, 16))]
    assert [epoch.peak for _, epoch in callback.history] == [1e6] * 4
    assert all(value > 0 for _, epoch in callback.history for value in epoch.values().values())


def test_batches_of_unknown_size_count_as_the_counted_one():
    callback = Efficiency(peak=1e6)
    fitted(callback, SometimesText(), DataLoader(TextLater(), batch_size=None), max_epochs=3)
    assert [epoch.samples for _, epoch in callback.history] == [40, 0, 0]
    # A batch without a size counts as the counted one.
    assert [epoch.operations for _, epoch in callback.history] == [n * 8 * OF_A_SAMPLE for n in (5, 9, 9)]


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.5e12),
        ("NVIDIA H100 NVL", "bf16-true", 835.5e12),
        ("NVIDIA H200", "fp8", 1979e12),
        ("NVIDIA A100-SXM4-40GB", "64-true", 19.5e12),
        ("NVIDIA L4", "32-true", 30.3e12),
        ("NVIDIA GeForce RTX 3090 Ti", "16-mixed", 80e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "16-mixed", None),
        ("Tesla V100-SXM2-16GB", "16-mixed", 125e12),
        ("Tesla T4", "64-true", None),
        ("NVIDIA RTX 6000 Ada Generation", "16-mixed", 364.2e12),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "bf16-mixed", None),
        ("Some Device", "32-true", None),
    ],
)
def test_peaks_by_the_names_that_drivers_report(name: str, precision: str, peak: float | None):
    assert peak_of(name, precision) == peak


def test_products_of_float32_in_tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert peak_of("NVIDIA A100-SXM4-40GB", "32-true") == 156e12
        assert peak_of("Tesla T4", "32-true") == 8.1e12
        # The newer setting alone makes the older one unreadable.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert peak_of("NVIDIA A100-SXM4-40GB", "32-true") == 156e12
    finally:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        torch.set_float32_matmul_precision(before)


class TestEnergy:
    def powercap(self, folder: Path, microjoules: int) -> Path:
        (folder / "intel-rapl:0").mkdir(exist_ok=True)
        (folder / "intel-rapl:0" / "energy_uj").write_text(f"{microjoules}\n")
        (folder / "intel-rapl:0" / "max_energy_range_uj").write_text("9999999\n")
        return folder

    def test_processors_whose_counter_begins_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(energy, "_POWERCAP", self.powercap(tmp_path, 9_000_000))
        (meter,) = energy.meters_for([torch.device("cpu")], with_processors=True)
        self.powercap(tmp_path, 500_000)
        assert meter.joules() == pytest.approx(1.5)
        self.powercap(tmp_path, 700_000)
        assert meter.joules() == pytest.approx(1.7)
        assert energy.meters_for([torch.device("cpu")], with_processors=False) == []

    def test_a_counter_that_may_not_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(energy, "_POWERCAP", self.powercap(tmp_path, 0))
        (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
        assert energy.meters_for([torch.device("cpu")], with_processors=True) == []

    def test_energy_is_in_the_values_of_a_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(energy, "_POWERCAP", self.powercap(tmp_path, 1_000_000))

        class Draws(Net):
            def on_train_end(hooks) -> None:
                self.powercap(tmp_path, 3_500_000)

        callback = Efficiency()
        trainer = fitted(callback, Draws(), loader(40, 8))
        # The module's hook runs after those of callbacks, so the run ends with what was read before it.
        assert callback.usage.joules == 0.0
        found = section(trainer, None)
        assert "Energy is not available" not in found.text


def test_the_section_has_a_row_for_each_epoch():
    callback = Efficiency(peak=1e6)
    trainer = fitted(callback, Net(), loader(40, 8), max_epochs=3)
    found = section(trainer, None)
    assert [row[0] for row in found.table][1:] == ["whole training", *(f"epoch up to step {n}" for n in (5, 10, 15))]
    assert list(found.lines) == ["percent of the peak"]
    assert "Energy is not available" in found.text


@pytest.mark.parametrize("options", [{"peak": 0}, {"peak": -1.0}, {"counted_step": -1}, {"counted_step": 1.5}])
def test_arguments_that_are_refused(options: dict[str, Any]):
    refuses(lambda: Efficiency(**options), *options)
