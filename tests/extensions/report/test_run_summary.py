"""The closing table and what it is made of, under Lightning's own trainer."""

import copy
import io
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

import equipoise
from equipoise import RunReport
from equipoise.callbacks.progress.progress_bar import ProgressBar
from equipoise.extensions.report import fit_recorder, run_summary
from equipoise.extensions.report.run_summary import RunSummary
from tests.support.callback_runs import Clock, Small, loader, trainer
from tests.support.terminal import Terminal


@pytest.fixture
def clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    for module in (fit_recorder, run_summary):
        monkeypatch.setattr(module, "monotonic", clock)
    return clock


class Scored(Small):
    """Logs an accuracy with a value for each epoch, and a loss both by step and by epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train_loss", float(batch_idx), on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_acc", [0.5, 0.9, 0.7, 0.6][self.current_epoch])


def rows(text: str) -> dict[str, str]:
    """The table's rows."""
    pairs = [re.split(r"\s{2,}", line.strip()) for line in text.split("\n")]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def step_of(clock: Clock, seconds: dict[str, float]) -> Callable[[Any, str, int], None]:
    """Steps of a stage take so many seconds."""
    return lambda module, stage, batch_idx: clock.tick(seconds.get(stage, 0.0))


def fit(callbacks: list[L.Callback], *loaders: Any, cls: type = L.Trainer, module: Any = None, **options: Any) -> Any:
    """Fit for an epoch without a progress bar, and return the trainer."""
    run = trainer(cls, callbacks=callbacks, **{"max_epochs": 1, "enable_progress_bar": False, **options})
    run.fit(module or Small(), *loaders)
    return run


class TestTable:
    @pytest.mark.parametrize("cls", [L.Trainer, equipoise.Trainer])
    def test_the_table_of_a_fit(self, plain: io.StringIO, clock: Clock, tmp_path: Path, cls: type):
        best = ModelCheckpoint(tmp_path / "best", monitor="val_acc", mode="max", filename="{epoch}")
        options = {"max_epochs": 3, "enable_checkpointing": True, "num_sanity_val_steps": 1}
        module = Scored(step_of(clock, {"train": 0.5, "val": 3.0}))
        fit([RunSummary(), best], loader(8, batch_size=16), loader(2), cls=cls, module=module, **options)
        text = plain.getvalue()
        assert "Fit finished" in text
        memory = rows(text).pop("peak memory")
        assert rows(text) == {
            "train_loss": "3.500",
            "loss": "23.00",
            "late": "102.0",
            "val_loss": "12.00",
            "val_acc": "0.7000",
            "best val_acc": "0.9000",
            "epochs": "3",
            "steps": "24",
            "samples per second": "32",  # 16 samples in half a second
            "time per epoch": "10 s",  # eight steps and two of validation
            "total time": "33 s",  # the sanity check too
            "device": rows(text)["device"],
            "peak memory": memory,
        }
        assert rows(text)["device"].startswith("cpu, ")
        assert rows(text)["device"].endswith(" 1 thread")
        assert memory.split()[1] in ("MiB", "GiB")
        assert "Best checkpoint: best/epoch=1.ckpt\n" in text
        assert all(line.isprintable() for line in text.split("\n"))

    def test_each_of_several_devices_has_rows_of_its_own(self, plain: io.StringIO):
        run = trainer(L.Trainer, callbacks=[RunSummary()], max_epochs=1, enable_progress_bar=False)
        run.strategy.devices = ["cpu", "meta"]  # type: ignore[attr-defined]
        run.fit(Small(), loader(2))
        shown = rows(plain.getvalue())
        assert {name for name in shown if "device" in name} == {"device cpu", "device meta"}
        assert "peak memory cpu" in shown

    @pytest.mark.parametrize(
        ("cls", "options"),
        [(L.Trainer, {"max_epochs": 2}), (L.Trainer, {"max_steps": 11}), (equipoise.Trainer, {"max_steps": 11})],
    )
    def test_the_report_ends_with_the_same_values_and_peak(
        self, plain: io.StringIO, cls: type, options: dict[str, int]
    ):
        """Loggers receive every third step; the last one is another."""
        run = fit([RunSummary(), RunReport()], loader(7), loader(2), cls=cls, log_every_n_steps=3, **options)
        shown = rows(plain.getvalue())
        (file,) = Path().rglob("run.json")
        ends = {name: values[-1] for name, (_, values) in json.loads(file.read_text())["curves"].items()}
        assert {name: float(shown[name]) for name in ends} == ends
        assert ends["loss"] == run.global_step - 1
        page = file.with_name("report.html").read_text(encoding="utf-8")
        assert f"<dt>peak memory, cpu</dt><dd>{shown['peak memory']}</dd>" in page

    def test_values_are_those_lightning_holds_at_the_end(self, plain: io.StringIO):
        summary = RunSummary(table=False)
        options = {"max_epochs": 2, "logger": CSVLogger("."), "module": Scored()}
        run = fit([summary, LearningRateMonitor()], loader(8), [loader(2), loader(2)], **options)
        last = {name: curve[max(curve)] for name, curve in summary.history.items()}
        held = {name: float(value) for name, value in run.callback_metrics.items()}
        forks = ["train_loss_step", "train_loss_epoch"]
        assert last == {name: value for name, value in held.items() if name not in forks}
        assert {"lr-SGD", "train_loss", "val_acc/dataloader_idx_1"} <= last.keys()
        assert plain.getvalue() == ""

    @pytest.mark.parametrize("first", [True, False])
    def test_the_table_stands_below_the_progress_bar(self, terminal: Terminal, clock: Clock, first: bool):
        callbacks = [RunSummary(), ProgressBar()]
        trainer(callbacks=callbacks if first else callbacks[::-1], max_epochs=1).fit(
            Small(step_of(clock, {"train": 1.0})), loader(3)
        )
        lines = terminal.text.split("\n")
        assert lines[0].startswith("Epoch 1/1")
        assert "Fit finished" in "".join(lines[1:4])
        assert terminal.wrapped == []

    @pytest.mark.parametrize("options", [{"filename": "last"}, {"monitor": "loss", "save_last": True}])
    def test_the_last_checkpoint_is_named_alone_and_beside_the_best(
        self, plain: io.StringIO, tmp_path: Path, options: dict[str, Any]
    ):
        fit([RunSummary(), ModelCheckpoint(tmp_path, **options)], loader(2), enable_checkpointing=True)
        assert "Last checkpoint: last.ckpt\n" in plain.getvalue()
        assert ("best loss" in rows(plain.getvalue())) == ("monitor" in options)

    @pytest.mark.parametrize("cls", [L.Trainer, equipoise.Trainer])
    def test_the_table_of_zero_epochs(self, plain: io.StringIO, tmp_path: Path, cls: type):
        fit([RunSummary()], loader(2), cls=cls, max_epochs=0)
        shown = rows(plain.getvalue())
        assert (shown["epochs"], shown["steps"]) == ("0", "0")
        assert not {"samples per second", "time per epoch", "loss", "best val_acc"} & shown.keys()
        assert "heckpoint" not in plain.getvalue()
        assert list(tmp_path.iterdir()) == []

    def test_a_fast_dev_run_writes_no_file(self, plain: io.StringIO, tmp_path: Path):
        fit([RunSummary()], loader(9), loader(9), fast_dev_run=True)
        assert rows(plain.getvalue())["steps"] == "1"
        assert list(tmp_path.iterdir()) == []


class TestInterrupted:
    def failing(self, clock: Clock, error: type[BaseException], epoch: int, stage: str) -> Small:
        def step(module: Any, now: str, batch_idx: int) -> None:
            clock.tick(1)
            if (module.current_epoch, now, batch_idx) == (epoch, stage, 1) and not module.trainer.sanity_checking:
                raise error("stop")

        return Small(step)

    @pytest.mark.parametrize("cls", [L.Trainer, equipoise.Trainer])
    @pytest.mark.parametrize(
        ("error", "title"),
        [
            (KeyboardInterrupt, "Fit interrupted"),
            (ValueError, "Fit stopped by ValueError"),
            (SIGTERMException, "Fit ended by SIGTERM"),
        ],
    )
    def test_a_broken_fit_shows_what_it_has(
        self, plain: io.StringIO, clock: Clock, tmp_path: Path, error: type[BaseException], title: str, cls: type
    ):
        run = trainer(cls, callbacks=[RunSummary()], max_epochs=5, enable_progress_bar=False, num_sanity_val_steps=0)
        with pytest.raises((SystemExit, error)):  # Lightning's trainer leaves the program after an interrupt
            run.fit(self.failing(clock, error, 2, "train"), loader(4, batch_size=3), loader(2))
        assert title in plain.getvalue()
        shown = rows(plain.getvalue())
        # Lightning's trainer hands the values of an epoch on at its end.
        loss = "8.000" if cls is equipoise.Trainer else "7.000"
        assert (shown["loss"], shown["val_loss"], shown["epochs"], shown["steps"]) == (loss, "11.00", "2", "9")
        assert (shown["time per epoch"], shown["total time"]) == ("6 s", "14 s")
        assert shown["samples per second"] == "3"  # 27 samples; the tenth second went into the step that failed

    def test_an_interrupted_validation_is_no_training_time(self, plain: io.StringIO, clock: Clock):
        run = trainer(callbacks=[RunSummary()], max_epochs=5, enable_progress_bar=False, num_sanity_val_steps=0)
        with pytest.raises(ValueError, match="stop"):
            run.fit(self.failing(clock, ValueError, 0, "val"), loader(4, batch_size=3), loader(9))
        shown = rows(plain.getvalue())
        assert (shown["samples per second"], shown["epochs"]) == ("3", "0")
        assert "time per epoch" not in shown

    def test_a_failure_before_training_is_left_to_its_message(self, plain: io.StringIO, clock: Clock):
        def step(module: Any, stage: str, batch_idx: int) -> None:
            raise ValueError("sanity")

        run = trainer(callbacks=[RunSummary()], max_epochs=1, enable_progress_bar=False)
        for begin in (lambda: run.fit(Small(step), loader(2), loader(2)), lambda: run.test(Small(step), loader(2))):
            with pytest.raises(ValueError, match="sanity"):
                begin()
        assert plain.getvalue() == ""


class TestHistory:
    def test_validations_within_an_epoch_stand_at_their_fraction(self):
        summary = RunSummary(table=False)
        fit([summary], loader(8), loader(1), max_epochs=2, val_check_interval=0.25)
        assert list(summary.history["val_loss"]) == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]
        assert summary.history["loss"] == {1.0: 7.0, 2.0: 15.0}
        assert summary.history["late"] == {1.0: 100.0, 2.0: 101.0}

    def test_epochs_without_validation_have_no_value_of_it(self):
        summary = RunSummary(table=False)
        fit([summary], loader(2), loader(1), max_epochs=4, check_val_every_n_epoch=2)
        assert summary.history["val_loss"] == {2.0: 11.0, 4.0: 13.0}
        assert list(summary.history["loss"]) == [1.0, 2.0, 3.0, 4.0]

    @pytest.mark.parametrize(
        ("step", "epochs", "steps", "time"),
        [(8, "2 (1 in this run)", "10 (2 in this run)", "1 s"), (4, "2", "10 (6 in this run)", "1.5 s")],
    )
    def test_a_fit_resumed_within_an_epoch(
        self, plain: io.StringIO, clock: Clock, tmp_path: Path, step: int, epochs: str, steps: str, time: str
    ):
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        options = {"max_epochs": 2, "enable_checkpointing": True, "enable_progress_bar": False}
        module = Small(step_of(clock, {"train": 0.5}))
        trainer(callbacks=[saving], **options).fit(module, loader(5, batch_size=4))
        run = trainer(callbacks=[RunSummary(), saving], **options)
        run.fit(module, loader(5, batch_size=4), ckpt_path=tmp_path / f"step={step}.ckpt")
        shown = rows(plain.getvalue())
        assert (shown["samples per second"], shown["time per epoch"]) == ("8", time)
        assert (shown["epochs"], shown["steps"]) == (epochs, steps)

    def test_another_fit_with_the_same_callback_begins_anew(self):
        summary = RunSummary(table=False)
        for epochs in (3, 1):
            fit([summary], loader(4), loader(1), max_epochs=epochs, val_check_interval=0.5)
        assert summary.history["val_loss"] == {0.5: 10.0, 1.0: 10.0}

    def test_state_survives_pickle_and_deepcopy(self):
        summary = RunSummary(table=False)
        summary.load_state_dict({"history": {"val_loss": {1.0: 0.5}}, "validation_names": ["val_loss"]})
        for other in (summary, copy.deepcopy(summary), pickle.loads(pickle.dumps(summary))):
            state = other.state_dict()
            assert (state["history"], state["validation_names"]) == ({"val_loss": {1.0: 0.5}}, ["val_loss"])


class Shared(RunSummary):
    """Writes the counted samples into a file, from the main process."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            Path("samples.txt").write_text(f"{self._fit.factor * self._fit.throughput.samples:.0f}")
        super().on_fit_end(trainer, pl_module)


@pytest.mark.slow
def test_the_samples_of_all_processes_are_counted(tmp_path: Path):
    """Two real processes, each of which trains on half of the samples."""
    run = trainer(callbacks=[Shared()], max_epochs=2, strategy="ddp_fork", devices=2, enable_progress_bar=False)
    run.fit(Small(), loader(6, batch_size=2))
    assert (tmp_path / "samples.txt").read_text() == "24"
