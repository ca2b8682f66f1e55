"""`equipoise plan`: what the user sees."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from equipoise.extensions.common import bench
from tests.support.bounded_calls import call_here
from tests.support.projects import project_in

FILES = {
    "conf/config.yaml": """
        defaults: [equipoise, _self_, module: net, data: rows]
        trainer: {accelerator: cpu, max_epochs: 1}
        """,
    "conf/module/net.yaml": """
        {_target_: net.module.Net, width: 64, writes: null, reads: false, frozen: false, rows: null}
        """,
    "conf/data/rows.yaml": "{_target_: net.module.Rows, batch_size: 64}",
    "net/__init__.py": "",
    "net/module.py": """
        import torch
        from lightning.pytorch import LightningDataModule, LightningModule
        from torch import nn
        from torch.utils.data import DataLoader

        class Net(LightningModule):
            def __init__(self, *, width, writes, reads, frozen, rows):
                super().__init__()
                self.first = nn.Linear(64, width)
                self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)])
                self.blocks.requires_grad_(not frozen)
                self.writes = writes
                self.reads = reads
                self.rows = rows

            def training_step(self, batch, batch_idx):
                if self.writes:
                    open(self.writes, "w")
                if self.reads and batch.numpy().max() > 9:
                    raise ValueError("not reached")
                if self.rows:
                    batch = batch.view(self.rows, 64)
                loss = self.blocks(self.first(batch)).square().mean()
                self.log("loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())

        class Rows(LightningDataModule):
            def __init__(self, *, batch_size, positions=()):
                super().__init__()
                self.batch_size = batch_size
                self.positions = positions

            def train_dataloader(self):
                return DataLoader(torch.rand(128, *self.positions, 64), batch_size=self.batch_size)
        """,
}


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    with project_in(tmp_path, FILES, "net") as folder:
        yield folder


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(bench, "call_bounded", call_here)


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_the_plan_as_json_and_its_page(net: Path, equipoise: Any) -> None:
    code, out, err = equipoise("plan", "--json", "--html=pages/plan.html", "trainer.devices=[24GiB,12GiB]")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["batch_size"] == 64
    assert plan["method"] == "traced"
    entries = {entry["strategy"]: entry for entry in plan["strategies"]}
    assert {"single_device", "dp", "balanced", "ddp", "fsdp", "pipeline"} == set(entries)
    assert all(entry["fits"] for entry in entries.values())
    assert [device["samples"] for device in entries["dp"]["devices"]] == [32, 32]
    assert plan["recommendation"]["overrides"] == ["strategy=balanced"]
    assert plan["alternatives"] == []
    assert sorted(path.name for path in net.iterdir()) == ["conf", "net", "pages"]
    assert "balanced (recommended)" in (net / "pages" / "plan.html").read_text()


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_the_table_of_a_plan(net: Path, equipoise: Any) -> None:
    code, out, err = equipoise("plan", "trainer.devices=RTX4090", "strategy=pipeline")
    assert code == 0, err
    assert "tracing a step without memory" in err
    assert "RTX4090" in out
    assert "Take single_device: it is the simplest strategy on one device" in out
    assert "pipeline: not predicted: a pipeline needs two devices or more, not 1." in out
    # One device has one row besides that of the configured strategy.
    assert "ddp" not in out


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_divided_sequences_need_half_of_the_activations(net: Path, equipoise: Any) -> None:
    def planned(*overrides: str) -> Any:
        arguments = ("trainer.devices=2x24GiB", "strategy=fsdp", *overrides)
        code, out, err = equipoise("plan", "--json", *arguments)
        assert code == 0, err
        (entry,) = [entry for entry in json.loads(out)["strategies"] if entry["strategy"] == "fsdp"]
        return entry

    whole, divided = (planned("+data.positions=[32]", f"strategy.context={size}") for size in (1, 2))
    parts, divided_parts = (entry["devices"][0]["peak"]["parts"] for entry in (whole, divided))
    # The first layer keeps its part of the batch, which is a copy.
    assert parts["activation"] + parts["batch"] == pytest.approx(2 * divided_parts["activation"], rel=0.01)
    assert [whole["batches"], divided["batches"]] == [2, 1]
    # The second dimension of this batch is none of positions.
    assert "module.py" in planned("strategy.context=2")["reason"]


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_compiled_and_offloaded_steps_are_predicted_without(net: Path, equipoise: Any) -> None:
    arguments = ("trainer.devices=24GiB", "trainer.compile=true", "trainer.offload_activations=true")
    code, out, err = equipoise("plan", "--json", *arguments)
    assert code == 0, err
    offloaded, compiled = json.loads(out)["notes"]
    assert offloaded == "trainer.offload_activations is not part of the prediction."
    assert compiled.startswith("trainer.compile is not part of the prediction, which is that of eager steps.")
    assert "0.65 to 0.9" in compiled


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_remedies_are_told_if_nothing_fits(net: Path, equipoise: Any) -> None:
    arguments = ("module.width=4096", "trainer.devices=1690MiB", "data.batch_size=128")
    code, out, err = equipoise("plan", *arguments)
    assert code == 0, err
    assert "does not fit" in out
    assert "too much" in out
    assert "nothing fits: tracing a step with trainer.precision=bf16-mixed ..." in err
    assert "trainer.activation_checkpointing=[blocks.*]" in out
    assert "trainer.precision=bf16-mixed" in out


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_frozen_weights_in_four_bits_help_if_nothing_fits(net: Path, equipoise: Any) -> None:
    pytest.importorskip("bitsandbytes")
    arguments = ("module.width=4096", "module.frozen=true", "trainer.devices=700MiB", "data.batch_size=8")
    code, out, err = equipoise("plan", "--json", *arguments)
    assert code == 0, err
    plan = json.loads(out)

    def fits(planned: dict[str, Any]) -> bool:
        return any(entry["fits"] for entry in planned["strategies"])

    assert not fits(plan)
    fitting = [alternative["overrides"] for alternative in plan["alternatives"] if fits(alternative)]
    assert fitting[0] == ["callbacks=[step_times,run_summary,run_report,memory_logger,quantization]"]
    # The overrides are those of a run.
    code, out, err = equipoise("plan", "--json", *arguments, *fitting[0])
    assert code == 0, err
    assert fits(json.loads(out))


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_a_step_that_cannot_be_traced_is_measured(net: Path, equipoise: Any) -> None:
    code, out, err = equipoise("plan", "--json", "module.reads=true", "trainer.devices=24GiB")
    assert code == 0, err
    plan = json.loads(out)
    assert plan["method"] == "measured"
    assert plan["notes"][0].startswith("module.py:")
    assert plan["notes"][0].endswith("so real steps were run.")
    traced = json.loads(equipoise("plan", "--json", "trainer.devices=24GiB")[1])
    peaks = [result["strategies"][0]["devices"][0]["peak"]["nbytes"] for result in (plan, traced)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.001)


@pytest.mark.usefixtures("without_processes")
def test_a_step_of_one_batch_size_has_no_curves(net: Path, equipoise: Any) -> None:
    code, out, err = equipoise("plan", "--json", "--html=plan.html", "module.rows=64", "trainer.devices=2x24GiB")
    assert code == 0, err
    plan = json.loads(out)
    entries = {entry["strategy"]: entry for entry in plan["strategies"]}
    assert [entries[name]["largest_batch"] for name in ("ddp", "dp")] == [64, 0]
    assert "a step with 32 samples fails" in entries["dp"]["reason"]
    assert plan["curves"] == {}
    assert "No strategy is predicted with several batch sizes." in (net / "plan.html").read_text()


@pytest.mark.few_cases(4)
@pytest.mark.usefixtures("without_processes")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["module.writes=x.txt"], "writes the file 'x.txt' at module.py"),
        (["trainer.devices=2x24"], "There is no device '24'"),
        (["--timeout=soon"], "--timeout takes seconds above 0"),
        (["--jsn"], "equipoise plan takes overrides"),
        (["--html="], "--html takes the name of a file"),
        (["--html=net"], "--html takes the name of a file"),
        (["~data"], "reads one batch of the data"),
    ],
)
def test_arguments_that_are_refused(net: Path, equipoise: Any, arguments: list[str], message: str) -> None:
    code, out, err = equipoise("plan", *arguments)
    assert code == 2
    assert message in err
    assert out == ""
    assert sorted(path.name for path in net.iterdir()) == ["conf", "net"]
