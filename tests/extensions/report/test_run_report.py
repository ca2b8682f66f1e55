"""The report that a fit leaves, under Lightning's trainer and ours: whole, broken off, resumed, in two processes."""

import json
import math
import platform
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import equipoise
from equipoise import OOMRecovery, RunReport, RunSummary
from equipoise.extensions.report import fit_recorder, run_report
from equipoise.extensions.report.throughput import Throughput
from equipoise.memory.records import Composition, MemoryPoint, TensorRecord
from tests.extensions.common.page.parsing import Element, parse, sections
from tests.support.callback_runs import Clock, Small, loader, trainer
from tests.support.elsewhere import url_of

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists")
BOTH = pytest.mark.parametrize("cls", [L.Trainer, equipoise.Trainer])


@pytest.fixture
def clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    for module in (fit_recorder, run_report):
        monkeypatch.setattr(module, "monotonic", clock)
    return clock


def fit(cls: type, module: L.LightningModule, *loaders: Any, callbacks: Any = (), **options: Any) -> Any:
    options = {"max_epochs": 2, "enable_progress_bar": False, "num_sanity_val_steps": 0, **options}
    run = trainer(cls, callbacks=[*callbacks] or [RunReport()], **options)
    run.fit(module, *loaders)
    return run


def read(folder: Path = Path(".")) -> Element:
    return parse((folder / "report.html").read_text(encoding="utf-8"))


def facts(document: Element) -> dict[str, str]:
    return {tile.one("dt").text: tile.one("dd").text for tile in document.one("dl", "facts").all("div")}


def curves(document: Element) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """Values by what was measured and where."""
    return {
        (figure.one("h3").text, line.attributes["data-label"]): (
            [float(x) for x in line.attributes["data-x"].split()],
            [float(y) for y in line.attributes["data-y"].split()],
        )
        for figure in sections(document)["Learning curves"].all("figure")
        for line in figure.all("g", "line")
    }


def failing(error: type[BaseException], text: str = "stop") -> Small:
    """Fails in the second epoch."""

    def step(module: Any, stage: str, batch_idx: int) -> None:
        if module.current_epoch == 1:
            raise error(text)

    return Small(step)


class TestFit:
    @BOTH
    def test_a_whole_fit_tells_facts_curves_and_throughput(self, clock: Clock, cls: type):
        module = Small(lambda module, stage, batch_idx: clock.tick({"train": 0.5, "val": 7.0}[stage]))
        fit(cls, module, loader(4, batch_size=8), loader(1))
        document = read()
        assert "Small finished" in document.one("header").text
        told = facts(document)
        assert told["samples per second"] == "16"
        assert (told["epochs"], told["steps"], told["parameters"], told["time in training"]) == ("2", "8", "3", "4 s")
        assert told["strategy"] in ("single_device", "SingleDeviceStrategy")
        assert told["precision"] == "32-true"
        assert told["peak memory, cpu"].endswith("iB")
        assert curves(document) == {
            ("loss", "loss"): ([3, 7], [3, 7]),
            ("loss", "val"): ([3, 7], [10, 11]),
            ("late", "late"): ([3, 7], [100, 101]),
        }
        section = sections(document)["Learning curves"]
        assert "by step" in section.one("h2").text
        for figure in section.all("figure"):
            ends = [(end.one("text").text, end.one("line").attributes["x1"]) for end in figure.all("g", "boundary")]
            assert ends == [("epoch 1", "0.00%"), ("epoch 2", "100.00%")]
        (line,) = sections(document)["Throughput"].all("g", "line")
        assert set(line.attributes["data-y"].split()) == {"16"}
        middles = [0.25, 0.75, 1.25, 1.75, 9.25, 9.75, 10.25, 10.75]
        assert [float(x) for x in line.attributes["data-x"].split()] == middles
        assert [row.all("td")[0].text for row in sections(document)["Devices"].one("tbody").all("tr")] == ["cpu"]
        assert "MemoryLogger()" in sections(document)["Memory"].text
        assert "Events" not in sections(document)

    @BOTH
    def test_it_lies_in_the_folder_of_the_logger_and_tells_what_lies_there(self, tmp_path: Path, cls: type):
        folder = tmp_path / "logs" / "mine"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("module:\n  lr: <0.1>\n")
        (tmp_path / "config.yaml").write_text("not: this\n")
        fit(cls, Small(), loader(2), logger=CSVLogger("logs", "mine", ""))
        assert sections(read(folder))["Configuration"].one("pre").text == "module:\n  lr: <0.1>\n"
        assert not (tmp_path / "report.html").exists()

    def test_hyperparameters_stand_for_a_configuration(self, tmp_path: Path):
        (tmp_path / "config.yaml").write_text("of: the program\n")

        class Hyper(Small):
            def __init__(self, lr: float, more: dict[str, Any]) -> None:
                super().__init__()
                self.save_hyperparameters()

        fit(L.Trainer, Hyper(0.1, {"a": "<b>", "t": torch.ones(2, 3)}), loader(2))
        text = sections(read())["Configuration"].one("pre").text
        assert text == "lr: 0.1\nmore:\n  a: '<b>'\n  t: tensor of (2, 3)\n"

    @BOTH
    def test_the_best_checkpoint_of_each_callback_is_told(self, tmp_path: Path, cls: type):
        options = {"monitor": "val_loss", "filename": "{epoch}"}
        saving = [ModelCheckpoint(tmp_path / mode, mode=mode, **options) for mode in ("min", "max")]
        fit(cls, Small(), loader(2), loader(1), callbacks=[RunReport(), *saving], enable_checkpointing=True)
        told = facts(read())
        assert (told["best val_loss"], told["best checkpoint"]) == ("10, 11", "min/epoch=0.ckpt, max/epoch=1.ckpt")

    def test_batches_are_counted_where_samples_cannot(self, clock: Clock):
        class Ragged(Small):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                clock.tick(0.25)
                self.log("loss", 1.0, batch_size=2)
                return self.layer(batch[0]).square().mean()

        ragged = DataLoader([0] * 4, batch_size=2, collate_fn=lambda batch: [torch.ones(2), torch.ones(3)])
        fit(L.Trainer, Ragged(), ragged)
        assert facts(read())["batches per second"] == "4"

    @BOTH
    def test_a_fast_dev_run_and_an_evaluation_leave_none(self, tmp_path: Path, cls: type):
        run = fit(cls, Small(), loader(2), loader(2), fast_dev_run=True)
        run.validate(Small(), loader(2), verbose=False)
        run.test(Small(), loader(2), verbose=False)

        def fail(*_: Any) -> None:
            raise ValueError("stop")

        with pytest.raises(ValueError, match="stop"):
            trainer(cls, callbacks=[RunReport()], enable_progress_bar=False).test(Small(fail), loader(2))
        assert list(tmp_path.glob("**/report.html")) == []

    @BOTH
    def test_a_fit_of_zero_epochs_has_a_report(self, cls: type):
        fit(cls, Small(), loader(2), max_epochs=0)
        assert facts(read())["steps"] == "0"

    def test_the_path_of_the_page_is_printed(self, capsys: pytest.CaptureFixture[str]):
        fit(equipoise.Trainer, Small(), loader(2))
        plain = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)  # another test may have made a console
        assert plain.endswith("Report: report.html\n")

    @BOTH
    def test_a_long_fit_is_written_down_now_and_then(self, clock: Clock, cls: type):
        seen: list[tuple[int, str]] = []

        def step(module: Any, stage: str, batch_idx: int) -> None:
            clock.tick(25)
            if batch_idx == 0 and Path("report.html").exists():
                seen.append((module.current_epoch, read().one("header").one("span", "pill").text))
                Path("report.html").unlink()

        fit(cls, Small(step), loader(2), max_epochs=6)
        assert seen == [(2, "running"), (4, "running")]
        assert read().one("header").one("span", "pill").text == "finished"

    def test_of_optimisers_in_turn_the_steps_of_the_curves_count(self):
        class InTurn(Small):
            automatic_optimization = False

            def training_step(self, batch: Any, batch_idx: int) -> None:
                self.log("loss", self.layer(batch[0]).mean(), on_step=True)
                for optimizer in self.optimizers():
                    optimizer.step()

            def configure_optimizers(self) -> Any:
                return [super(InTurn, self).configure_optimizers() for _ in range(2)]

        fit(equipoise.Trainer, InTurn(), loader(4))
        told = facts(read())
        assert (told["steps"], told["optimiser steps"]) == ("8", "16")
        run = json.loads(Path("run.json").read_text(encoding="utf-8"))
        assert (run["steps"], run["times"][0][-1]) == (8, 8)


class TestTest:
    @BOTH
    def test_its_metrics_come_first_and_later_ones_replace_them(self, cls: type):
        seen = iter((0.25, 0.5))

        class Tested(Small):
            def on_test_epoch_start(self) -> None:
                self.accuracy = next(seen)

            def test_step(self, batch: Any, batch_idx: int) -> None:
                self.log("test_accuracy", self.accuracy)

        run = fit(cls, Tested(), loader(3), loader(1))
        before = Path("report.html").read_text(encoding="utf-8")
        for accuracy in ("0.25", "0.5"):
            run.test(run.lightning_module, loader(1), verbose=False)
            told = facts(read())
            assert [*told.items()][:1] == [("test_accuracy", accuracy)]
            values = json.loads(Path("run.json").read_text(encoding="utf-8"))
            assert (values["curves"]["test_accuracy"], values["state"]) == ([[5], [float(accuracy)]], "finished")
        assert {name: value for name, value in told.items() if name != "test_accuracy"} == facts(parse(before))

    def test_one_elsewhere_changes_no_report(self, tmp_path: Path):
        report = RunReport()
        fit(equipoise.Trainer, Small(), loader(3), callbacks=[report])
        before = Path("report.html").read_bytes()
        elsewhere = trainer(equipoise.Trainer, callbacks=[report], default_root_dir=tmp_path / "elsewhere")
        elsewhere.test(Small(), loader(1), verbose=False)
        assert Path("report.html").read_bytes() == before

    def test_a_report_that_cannot_be_written_fails_no_test(self):
        run = fit(equipoise.Trainer, Small(), loader(3))
        Path("run.json").write_text("{", encoding="utf-8")
        with pytest.warns(UserWarning, match="The report could not be written"):
            run.test(run.lightning_module, loader(1), verbose=False)


class TestBroken:
    @BOTH
    def test_a_failure_leaves_its_error(self, cls: type):
        with pytest.raises(ValueError, match="<script>"):
            fit(cls, failing(ValueError, "<script>alert(1)</script>"), loader(3), loader(1))
        document = read()
        assert "Small failed" in document.one("header").text
        error = sections(document)["What went wrong"]
        assert error.one("p", "cause").text == "ValueError: <script>alert(1)</script>"
        assert error.one("p", "place").text.endswith(", in step")
        assert "in training_step" in error.all("pre")[-1].text
        assert curves(document)["loss", "val"] == ([2], [10])
        assert facts(document)["steps"] == "3"

    def test_a_failure_in_a_library_shows_no_frames_of_this_one(self):
        uneven = DataLoader([torch.ones(2), torch.ones(3)], batch_size=2)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="equal size"):
            fit(equipoise.Trainer, Small(), uneven)
        error = sections(read())["What went wrong"]
        assert "default_collate" in error.one("pre").text
        assert "equipoise/" not in error.one("pre").text

    def test_an_error_that_goes_on_keeps_its_frames(self):
        class Names(L.Callback):
            def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
                frames.append([frame.filename for frame in traceback.extract_tb(exception.__traceback__)])

        frames: list[list[str]] = []
        with pytest.raises(ValueError, match="stop"):
            fit(equipoise.Trainer, failing(ValueError), loader(3), callbacks=[Names(), RunReport(), Names()])
        before, after = frames
        assert before == after != []

    @BOTH
    @pytest.mark.parametrize(("error", "told"), [(KeyboardInterrupt, ""), (SIGTERMException, "SIGTERM ended it.")])
    def test_an_interruption_is_no_failure(self, cls: type, error: type[BaseException], told: str):
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            fit(cls, failing(error), loader(3))
        document = read()
        assert "Small interrupted" in document.one("header").text
        found = sections(document)
        assert ("What went wrong" in found) == bool(told)
        if told:
            assert told in found["What went wrong"].text

    @pytest.mark.parametrize(
        ("cls", "hook"),
        [(L.Trainer, "setup"), (equipoise.Trainer, "prepare_data"), (equipoise.Trainer, "on_train_start")],
    )
    def test_a_failure_before_training_leaves_one_too(self, cls: type, hook: str):
        module = Small()

        def fail(*args: Any, **kwargs: Any) -> None:
            raise ValueError("early")

        setattr(module, hook, fail)
        with pytest.raises(ValueError, match="early"):
            fit(cls, module, loader(3))
        assert sections(read())["What went wrong"].one("p", "cause").text == "ValueError: early"

    def test_a_mistake_in_the_options_is_left_to_its_message(self, tmp_path: Path):
        with pytest.raises(equipoise.ConfigurationError):
            fit(equipoise.Trainer, Small())
        # This one is found when the sanity check has logged val_loss.
        callbacks = [RunReport(), EarlyStopping("val/loss")]
        with pytest.raises(equipoise.ConfigurationError, match="did you mean"):
            fit(equipoise.Trainer, Small(), loader(1), loader(1), callbacks=callbacks, num_sanity_val_steps=1)
        assert list(tmp_path.rglob("*.html")) == []

    @BOTH
    def test_a_page_that_cannot_be_written_warns_once_and_fails_nothing(self, tmp_path: Path, cls: type):
        (tmp_path / "report.html").mkdir()
        with pytest.warns(UserWarning, match=r"The report could not be written: .*report\.html") as warned:
            run = fit(cls, Small(), loader(2))
        assert len([each for each in warned if "report" in str(each.message)]) == 1
        assert run.global_step == 4

    def test_the_error_goes_on_where_no_page_can_be_written(self, tmp_path: Path):
        (tmp_path / "report.html").mkdir()
        with pytest.warns(UserWarning, match="The report"), pytest.raises(ValueError, match="stop"):
            fit(equipoise.Trainer, failing(ValueError), loader(2))


class TestGoingOn:
    def resume(self, cls: type, *epochs: int, beside: Sequence[L.Callback] = ()) -> Element:
        """Fit, continue in another trainer, and return the page."""
        for max_epochs, ckpt_path in zip(epochs, (None, "last.ckpt"), strict=True):
            saving = ModelCheckpoint(".", filename="last", save_on_train_epoch_end=True, enable_version_counter=False)
            callbacks = [RunReport(), *beside, saving]
            run = trainer(cls, callbacks=callbacks, max_epochs=max_epochs, enable_checkpointing=True)
            run.fit(Small(), loader(4), loader(1), ckpt_path=ckpt_path)
        return read()

    @pytest.mark.parametrize(
        ("cls", "beside"), [(L.Trainer, []), (L.Trainer, [RunSummary(table=False)]), (equipoise.Trainer, [])]
    )
    def test_a_resumed_fit_has_whole_curves(self, cls: type, beside: list[L.Callback]):
        document = self.resume(cls, 2, 3, beside=beside)
        assert curves(document)["loss", "val"] == ([3, 7, 11], [10, 11, 12])
        assert curves(document)["late", "late"] == ([3, 7, 11], [100, 101, 102])
        (row,) = sections(document)["Events"].one("tbody").all("tr")
        assert [cell.text for cell in row.all("td")] == ["0 s", "8", "resumed", "Continued from last.ckpt."]

    def test_a_fit_that_is_resumed_at_its_end_has_a_report(self):
        assert "finished" in self.resume(equipoise.Trainer, 1, 1).one("h1").text
        assert json.loads(Path("run.json").read_text())["state"] == "finished"

    def test_a_second_fit_of_a_trainer_tells_of_both(self, clock: Clock):
        module = Small(lambda module, stage, batch_idx: clock.tick(1))
        run = fit(equipoise.Trainer, module, loader(3))
        run.max_epochs = 4
        run.fit(module, loader(3))
        document = read()
        assert curves(document)["late", "late"] == ([2, 5, 8, 11], [100, 101, 102, 103])
        assert facts(document)["time in training"] == "12 s"


class Recorder(L.Callback):
    """Keeps what a logger of memory would."""

    def __init__(self) -> None:
        values = {"step": 1, "phase": "backward", "device": "cuda:0"}
        self.timeline = [MemoryPoint(**values, seconds=0.5, allocated=2**20, reserved=2**22, peak=2**21)]
        holder = TensorRecord(module="a", category="parameter", name="weight", shape=(2,), dtype="float32", nbytes=8)
        self.compositions = [Composition(**values, nbytes=8, holders=(holder,))]
        self.leaks = [Leak(step=7, seconds=0.25)]


class Leak(SimpleNamespace):
    def __str__(self) -> str:
        return "It grows."


class Tight(Small):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch[0]) > 2:
            raise torch.OutOfMemoryError("out of memory: too many samples")
        return super().training_step(batch, batch_idx)


class TestWhatOthersKeep:
    def test_memory_and_leaks_that_a_memory_logger_noted(self):
        fit(L.Trainer, Small(), loader(2), callbacks=[Recorder(), RunReport()])
        document = read()
        assert facts(document)["peak memory, cuda:0"] == "2.0 MiB"
        assert len(sections(document)["Memory"].all("figure")) == 1
        assert "a · weight" in sections(document)["The peak"].text
        assert [cell.text for cell in sections(document)["Events"].one("tbody").all("td")] == [
            "0.25 s",
            "7",
            "leak",
            "It grows.",
        ]

    def test_out_of_memory_events_of_this_fit(self):
        callbacks = [OOMRecovery(), RunReport()]
        for _ in range(2):
            with pytest.warns(UserWarning, match="ran out of memory"):
                fit(equipoise.Trainer, Tight(), loader(1, batch_size=4), callbacks=callbacks, max_epochs=1)
        (row,) = sections(read())["Events"].one("tbody").all("tr")
        assert row.all("td")[2].text == "out of memory"
        assert re.match("Batch 0 ", row.all("td")[3].text)


class TestThroughput:
    def test_stretches_grow_longer_and_nothing_is_lost(self):
        meter = Throughput()
        meter.begin(0.0)
        for index in range(1, 50_001):
            meter.add(3, 0.1 * index)
        meter.pause(5000.0)
        points = meter.points(0.0, factor=2)
        assert 400 <= len(points) <= 1024
        assert all(math.isclose(rate, 60, rel_tol=0.02) for _, rate in points)
        assert (meter.samples, meter.batches) == (150_000, 50_000)
        assert meter.seconds == pytest.approx(5000)


class TestPipeline:
    def test_the_last_step_is_drawn(self):
        """Of 5 batches of 3 samples the last has 2 of them, so it has two micro-batches."""
        samples = TensorDataset(torch.ones(14, 2))
        module = Small()
        module.layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        strategy = equipoise.PipelineStrategy(cut_before=["layer.1"], micro_batches=3)
        options = {"strategy": strategy, "devices": ["cpu", "cpu"], "max_epochs": 1}
        fit(equipoise.Trainer, module, DataLoader(samples, batch_size=3), **options)
        section = sections(read())["The pipeline"]
        assert "1f1b, 2 stages, 2 micro-batches" in section.one("figcaption").text
        assert [text.text for text in section.one("svg", "labels").all("text")] == ["stage 0, cpu", "stage 1, cpu"]
        # Forward and backward of each micro-batch in each stage.
        assert len(section.all("g", "bar")) == 8


TWO_PROCESSES = {"devices": 2, "strategy": "ddp", "log_every_n_steps": 1}


@pytest.mark.slow
class TestTwoProcesses:
    def test_samples_of_all_are_counted(self):
        run = fit(equipoise.Trainer, LogsMeans(), loader(6, batch_size=2), **TWO_PROCESSES)
        document = read()
        # The mean over both processes, which all of them compute though only the first one records it.
        steps, values = curves(document)["rank", "rank"]
        assert steps == [float(step) for step in range(run.global_step)]
        assert set(values) == {0.5}
        assert facts(document)["strategy"] == "ddp, 2 processes"
        assert "of the first process" not in document.text
        assert [row.all("td")[0].text for row in sections(document)["Devices"].one("tbody").all("tr")] == ["cpu"]

    def test_devices_of_several_machines_have_the_names_of_their_machines(self):
        fit(equipoise.Trainer, OnAnotherMachine(), loader(6, batch_size=2), **TWO_PROCESSES)
        rows = sections(read())["Devices"].one("tbody").all("tr")
        assert [row.all("td")[0].text for row in rows] == ["machine 0 cpu", "machine 1 cpu"]

    @pytest.mark.parametrize("elsewhere", [False, True])
    def test_a_failure_of_another_process_leaves_one(self, tmp_path: Path, elsewhere: bool):
        folder = url_of(tmp_path / "run") if elsewhere else tmp_path / "run"
        with pytest.raises(Exception, match="stop here"):
            fit(equipoise.Trainer, FailsIn(1), loader(6, batch_size=2), default_root_dir=folder, **TWO_PROCESSES)
        (page,) = tmp_path.glob("**/report.html")
        document = read(page.parent)
        assert "failed" in document.one("header").text
        assert sections(document)["What went wrong"].one("p", "cause").text == "ValueError: stop here"
        # Others cannot be asked any more.
        assert "samples per second of the first process" in facts(document)
        assert not list(tmp_path.glob("**/.report*"))


class LogsMeans(Small):
    """Logs the number of the process, as the mean over processes."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("rank", float(self.trainer.global_rank), sync_dist=True)
        return super().training_step(batch, batch_idx)


class OnAnotherMachine(Small):
    """Each process is on a machine of its own."""

    def setup(self, stage: str) -> None:
        # The processes of a test end after it, so nothing is to be undone.
        platform.node = lambda: f"machine {self.global_rank}"


class FailsIn(Small):
    """Fails in one process."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == self.rank and self.current_epoch == 1:
            raise ValueError("stop here")
        return super().training_step(batch, batch_idx)


@BOTH
def test_a_report_is_written_to_another_file_system(
    memory_files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: type
) -> None:
    """Beside the checkpoint from which it is continued, and with the configuration that lies there."""
    monkeypatch.chdir(tmp_path)
    elsewhere = "memory://reported"
    memory_files.pipe_file("memory://reported/config.yaml", b"width: 17")
    for epochs, ckpt_path in ((2, None), (3, f"{elsewhere}/last.ckpt")):
        saves = ModelCheckpoint(elsewhere, filename="{epoch}", save_last=True)
        callbacks = [saves, RunReport()]
        options = {"default_root_dir": elsewhere, "enable_checkpointing": True}
        run = trainer(cls, callbacks=callbacks, max_epochs=epochs, **options)
        run.fit(Small(), loader(4), ckpt_path=ckpt_path)
        document = parse(memory_files.cat("memory://reported/report.html").decode())
        assert sections(document)["Configuration"].one("pre").text.strip() == "width: 17"
        steps, _ = curves(document)["loss", "loss"]
        assert len(steps) == epochs
    assert not list(tmp_path.iterdir())
