"""`equipoise savings`: what is measured, and what the user sees of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.extensions.comparison.savings import command as command_module
from equipoise.extensions.comparison.savings.results import compare
from equipoise.extensions.comparison.savings.savers import SAVERS, Saver
from tests.support.projects import project_in, write

# A deep network whose activations, gradients and weights are of similar size.
FILES = {
    "conf/config.yaml": """
        defaults: [equipoise, _self_, module: deep, data: rows]
        trainer: {accelerator: cpu, max_epochs: 1}
        """,
    "conf/module/deep.yaml": "{_target_: deep.module.Deep, fails: false}",
    "conf/data/rows.yaml": "{_target_: deep.module.Rows, batch_size: 64}",
    "deep/__init__.py": "",
    "deep/module.py": """
        import torch
        from lightning.pytorch import LightningDataModule, LightningModule
        from torch import nn
        from torch.utils.data import DataLoader

        class Deep(LightningModule):
            def __init__(self, *, fails):
                super().__init__()
                blocks = [nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU()) for _ in range(6)]
                self.net = nn.Sequential(*blocks)
                self.fails = fails

            def training_step(self, batch, batch_idx):
                if self.fails:
                    raise RuntimeError("no [steps] today")
                loss = self.net(batch).square().mean()
                self.log("loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())

        class Rows(LightningDataModule):
            def __init__(self, *, batch_size):
                super().__init__()
                self.batch_size = batch_size

            def train_dataloader(self):
                rows = torch.rand(128, 64, generator=torch.Generator().manual_seed(0))
                return DataLoader(rows, batch_size=self.batch_size)
        """,
}


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "150")
    with project_in(tmp_path, FILES, "deep") as folder:
        yield folder


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_each_saver_is_measured_beside_the_configured_run(deep: Path, equipoise: Any) -> None:
    code, out, err = equipoise("savings", "--json", "trainer.max_epochs=7")
    assert code == 0, err
    measured = json.loads(out)
    assert measured["device"] == "cpu"
    rows = {row["name"]: row for row in measured["savers"]}
    assert [*rows][:-1] == [saver.name for saver in SAVERS]
    usual = rows["as configured"]

    # 1. Numbers, and peaks that are known: a gradient is 16 KiB, as is the output of a layer.
    exact = ["step in backward", "in-place activations", "activation checkpointing", "all with equal numbers"]
    for name in exact:
        assert rows[name]["numbers"] == "to the bit", name
        assert rows[name]["peak"] < usual["peak"], name
        assert rows[name]["seconds"] > 0
    assert rows["all with equal numbers"]["peak"] <= min(rows[name]["peak"] for name in exact)
    assert usual["peak"] - rows["step in backward"]["peak"] >= 3 * 64 * 64 * 4
    for name in ("bf16-mixed", "accumulation of half batches"):
        assert rows[name]["numbers"].startswith("losses within"), rows[name]

    # 2. What cannot run.
    assert "no effect on a CPU" in rows["offloaded activations"]["reason"]
    assert "configure_optimizers chooses it" in rows["8-bit optimiser state"]["reason"]

    # 3. Nothing is left behind.
    assert sorted(path.name for path in deep.iterdir()) == ["conf", "deep"]

    # 4. The overrides do what they say.
    for name in ("step in backward", "in-place activations", "activation checkpointing"):
        assert equipoise("fit", "--cfg", "job", *rows[name]["overrides"])[0] == 0
    assert rows["activation checkpointing"]["overrides"] == ["trainer.activation_checkpointing=[net.*]"]


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_the_table(deep: Path, equipoise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "SAVERS", [SAVERS[0], SAVERS[1], SAVERS[4]])
    code, out, err = equipoise("savings")
    assert code == 0, err
    assert "measuring step in backward" in err
    assert "100%" in out
    assert "to the bit" in out
    assert "step in backward:\n  trainer.step_in_backward=true\n" in out
    assert "offloaded activations:\n  not measured: it has no effect on a CPU" in out


@pytest.mark.usefixtures("without_processes")
def test_a_step_that_fails_is_a_row(deep: Path, equipoise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_module, "SAVERS", SAVERS[:2])
    code, out, err = equipoise("savings", "module.fails=true")
    assert code == 0, err
    assert out.count("not measured: RuntimeError: no [steps] today") == 2


@pytest.mark.thorough
@pytest.mark.usefixtures("without_processes")
def test_a_step_without_a_loss_is_measured(deep: Path, equipoise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Manual optimisation returns none; weights are compared alone."""
    content = """
        from deep.module import Deep

        class ByHand(Deep):
            def __init__(self, *, fails):
                super().__init__(fails=fails)
                self.automatic_optimization = False

            def training_step(self, batch, batch_idx):
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(self.net(batch).square().mean())
                optimizer.step()
        """
    write(deep, {"deep/by_hand.py": content})
    monkeypatch.setattr(command_module, "SAVERS", [SAVERS[0], SAVERS[3]])
    code, out, err = equipoise("savings", "--json", "module._target_=deep.by_hand.ByHand", "trainer.max_epochs=7")
    assert code == 0, err
    usual, checkpointed = json.loads(out)["savers"]
    assert usual["peak"] > checkpointed["peak"]
    assert checkpointed["numbers"] == "to the bit"


@pytest.mark.usefixtures("without_processes")
def test_ctrl_c_keeps_what_is_done(deep: Path, equipoise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(trial: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_module, "SAVERS", [SAVERS[0], Saver("interrupted", interrupt), SAVERS[1]])
    code, out, _ = equipoise("savings", "--json")
    assert code == 130
    (row,) = json.loads(out)["savers"]
    assert row["name"] == "as configured"


@pytest.mark.few_cases(5)
@pytest.mark.usefixtures("without_processes")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--timeout=0",), "--timeout takes seconds above 0"),
        (("--multirun",), "--json and --timeout=SECONDS, not --multirun"),
        (("strategy=ddp", "trainer.devices=2"), "add strategy=single_device"),
    ],
)
def test_arguments_that_are_refused(deep: Path, equipoise: Any, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = equipoise("savings", *arguments)
    assert (code, out) == (2, "")
    assert message in err


# Processes.


ENDLESS = """
    import threading

    from deep.module import Deep

    class Endless(Deep):
        def training_step(self, batch, batch_idx):
            threading.Event().wait()
    """


@pytest.mark.thorough
def test_a_trial_that_takes_too_long_is_a_row(deep: Path, equipoise: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never ends, so the bound is reached on every machine, wherever its process is by then."""
    write(deep, {"deep/endless.py": ENDLESS})
    monkeypatch.setattr(command_module, "SAVERS", SAVERS[:2])
    code, out, err = equipoise("savings", "--json", "--timeout=0.25", "module._target_=deep.endless.Endless")
    assert code == 0, err
    rows = json.loads(out)["savers"]
    assert [row["name"] for row in rows] == ["as configured", "step in backward"]
    for row in rows:
        assert row["reason"].startswith("it took longer than ")
        assert row["reason"].endswith(" (--timeout=SECONDS)")
        assert row["peak"] is None


# Parts.


@pytest.mark.parametrize(
    ("losses", "digest", "expected"),
    [
        ([1.0, 2.0], "a", "to the bit"),
        ([1.0, 2.0], "b", "losses to the bit"),
        ([1.0, 2.02], "b", "losses within 1e-02"),
        ([0.0, 2.0], "b", "losses within 1e+00"),
        ([float("nan"), 2.0], "b", "losses differ"),
        ([None, 2.0], "b", "weights differ"),
    ],
)
def test_losses_and_weights_are_compared(losses: list[float | None], digest: str, expected: str) -> None:
    assert compare({"losses": losses, "digest": digest}, {"losses": [1.0, 2.0], "digest": "a"}) == expected
    assert compare({"losses": losses, "digest": digest}, None) is None


def test_savers_leave_the_configuration_alone() -> None:
    values = {"trainer": {"precision": "64-true", "step_in_backward": True}, "callbacks": {}, "data": {"batch_size": 3}}
    before = json.dumps(values)
    trials = {saver.name: saver.trial(values) for saver in SAVERS}
    assert json.dumps(values) == before
    assert "already" in str(trials["bf16-mixed"].reason)
    assert "already" in str(trials["step in backward"].reason)
    assert "halved" in str(trials["accumulation of half batches"].reason)
