"""The bar under Lightning's trainer and ours: what it shows, and when it draws."""

import contextlib
import io
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import rich
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.live import Live
from torch import Tensor
from torch.utils.data import DataLoader

import equipoise
from equipoise.callbacks.progress.latest_values import LatestValues
from equipoise.callbacks.progress.progress_bar import ProgressBar
from equipoise.extensions.report.run_summary import RunSummary
from tests.support.callback_runs import Clock, Small, loader, ticking, trainer
from tests.support.terminal import Terminal
from tests.support.trainer_runs import Stream

Step = Callable[[Any, str, int], None]


class Recording(ProgressBar):
    """Writes down when it read the metrics, which it does once a redraw."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        super().__init__(**options)
        self.clock = clock
        self.times: list[float] = []

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        self.times.append(round(self.clock() - 1000, 6))
        return super().get_metrics(trainer, pl_module)


class Screens(list[str]):
    """A step that takes a second, and writes down what stands on the screen.

    Attributes:
        terminal: Where the bar is drawn.
        clock: Its time.
    """

    def __init__(self, terminal: Terminal, clock: Clock) -> None:
        super().__init__()
        self.terminal, self.clock = terminal, clock

    def __call__(self, module: Any, stage: str, batch_idx: int) -> None:
        self.append(self.terminal.text)
        self.clock.tick(1)


@pytest.fixture
def screens(terminal: Terminal, clock: Clock) -> Screens:
    return Screens(terminal, clock)


def fit(step: Step, *loaders: Any, bar: ProgressBar | None = None, cls: type = L.Trainer, **options: Any) -> Any:
    """Train for one epoch with a bar, by default of three batches."""
    run = trainer(cls, callbacks=[bar or ProgressBar()], **{"max_epochs": 1, **options})
    run.fit(Small(step), *(loaders or (loader(3),)))
    return run


both_trainers = pytest.mark.parametrize("cls", [L.Trainer, equipoise.Trainer])


class TestScreen:
    @pytest.mark.parametrize(("cls", "leave"), [(L.Trainer, True), (equipoise.Trainer, True), (L.Trainer, False)])
    def test_every_epoch_leaves_its_line_or_the_last_alone(
        self, make_terminal: Callable[[int], Terminal], clock: Clock, cls: type, leave: bool
    ):
        terminal, bar = make_terminal(120), ProgressBar(leave=leave)
        run = fit(ticking(clock, 0.5), loader(8), loader(2), bar=bar, cls=cls, max_epochs=2)
        assert run.progress_bar_callback is bar
        # Eight batches of half a second; the validation's second is its own; `late` is logged at the epoch's very end.
        bar_and_rate = f"{'━' * 30}  8/8  2.00 it/s  0:04"
        lines = [
            f"Epoch 1/2  {bar_and_rate}  loss 7.000  val_loss 10.00  late 100.0",
            f"Epoch 2/2  {bar_and_rate}  loss 15.00  val_loss 11.00  late 101.0",
        ]
        assert terminal.text.split("\n") == (lines if leave else lines[1:])
        assert terminal.cursor_visible
        assert terminal.wrapped == []

    def test_an_epoch_as_it_goes(self, screens: Screens):
        fit(screens, loader(10))
        assert screens[0] == f"Epoch 1/1  {'─' * 30}   0/10  0:00"
        assert screens[4] == f"Epoch 1/1  {'━' * 12}{'─' * 18}   4/10  1.00 it/s  0:04<0:06  loss 3.000"

    @pytest.mark.thorough
    def test_nothing_runs_over_the_edge(self, make_terminal: Callable[[int], Terminal], clock: Clock):
        class Chatty(Small):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                for number in range(6):
                    self.log(f"a_rather_long_name_{number}", float(batch_idx) ** 3, prog_bar=True)
                return super().training_step(batch, batch_idx)

        screens = Screens(terminal := make_terminal(40), clock)
        trainer(callbacks=[ProgressBar(leave=False)], max_epochs=2).fit(
            Chatty(screens), loader(12), [loader(3), loader(3)]
        )
        assert terminal.wrapped == []
        assert all(len(screen.split("\n")) in (1, 2, 3) for screen in screens)
        assert len(terminal.text.split("\n")) == 2
        assert terminal.text.endswith("…")

    @both_trainers
    def test_validation_stands_below_its_epoch(self, terminal: Terminal, screens: Screens, cls: type):
        fit(screens, loader(4), [loader(3), loader(2)], cls=cls, num_sanity_val_steps=2, val_check_interval=2)
        assert screens[1] == f"Sanity Checking 1/2  {'━' * 15}{'─' * 15}  1/2  1.00 it/s  0:01<0:01"
        assert screens[4].startswith("Epoch 1/1")  # the sanity check left nothing
        validation = [screen.split("\n")[-1] for screen in screens if "Validation" in screen]
        assert (
            validation
            == [
                f"Validation 1/2  {'─' * 30}  0/3  0:00",
                f"Validation 1/2  {'━' * 10}{'─' * 20}  1/3  1.00 it/s  0:01<0:02",
                f"Validation 1/2  {'━' * 20}{'─' * 10}  2/3  1.00 it/s  0:02<0:01",
                f"Validation 1/2  {'━' * 30}  3/3  1.00 it/s  0:03<0:00",
                f"Validation 2/2  {'━' * 15}{'─' * 15}  1/2  0:00",
            ]
            * 2
        )
        assert all(screen.startswith("Epoch 1/1") for screen in screens if "Validation" in screen)
        assert "4/4  1.00 it/s  0:04" in terminal.text  # ten seconds of validation do not count
        assert "Validation" not in terminal.text

    @both_trainers
    def test_stages_of_their_own_have_their_line(
        self, make_terminal: Callable[[int], Terminal], clock: Clock, cls: type
    ):
        terminal, bar = make_terminal(140), ProgressBar()
        run, module = trainer(cls, callbacks=[bar]), Small(ticking(clock, 1))
        run.validate(module, loader(3), verbose=False)
        run.test(module, [loader(3), loader(4)], verbose=False)
        run.predict(module, loader(5))
        losses = "test_loss/dataloader_idx_0 20.00  test_loss/dataloader_idx_1 20.00"
        assert terminal.text.split("\n") == [
            f"Validation  {'━' * 30}  3/3  1.00 it/s  0:03  val_loss 10.00",
            f"Testing 2/2  {'━' * 30}  4/4  1.00 it/s  0:03  {losses}",
            f"Predicting  {'━' * 30}  5/5  1.00 it/s  0:05",
        ]
        assert terminal.cursor_visible

    def test_loaders_without_length(self, terminal: Terminal, screens: Screens):
        fit(screens, DataLoader(Stream(5)), max_epochs=-1, max_steps=3)
        assert screens[2].startswith(f"Epoch 1  {'━' * 20}{'─' * 10}  2/3")
        fit(screens, DataLoader(Stream(5)), DataLoader(Stream(2)))
        assert screens[-1].split("\n")[-1] == "Validation  1/?  1.00 it/s  0:01"
        assert terminal.text.split("\n")[-1].startswith("Epoch 1/1  5/?  1.00 it/s  0:05")

    def test_max_steps_end_an_epoch_early(self, terminal: Terminal, screens: Screens):
        bar = ProgressBar(leave=False)
        fit(screens, loader(10), bar=bar, max_epochs=-1, max_steps=5, accumulate_grad_batches=3)
        # Four steps of 3, 3, 3 and 1 batches, then one of three.
        assert "1/10" in screens[1]
        assert screens[11].startswith("Epoch 2")
        assert "1/3" in screens[11]
        assert "3/3" in terminal.text

    @both_trainers
    def test_a_resumed_epoch_goes_on_in_its_midst(
        self, terminal: Terminal, clock: Clock, screens: Screens, tmp_path: Path, cls: type
    ):
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        for path, step in ((None, ticking(clock, 1)), (tmp_path / "step=4.ckpt", screens)):
            run = trainer(cls, callbacks=[ProgressBar(), saving], max_epochs=1, enable_checkpointing=True)
            run.fit(Small(step), loader(8), ckpt_path=path)
        shown = [screen.split("\n")[-1] for screen in screens]
        assert len(shown) == 4
        assert "5/8  0:00  loss 4.000" in shown[1]
        assert "7/8  1.00 it/s  0:02<0:01" in shown[3]
        assert "8/8  1.00 it/s  0:03" in terminal.text.split("\n")[-1]

    def test_a_live_display_of_the_users_own_goes_on(self, terminal: Terminal, clock: Clock):
        with Live("mine", console=rich.get_console(), auto_refresh=False):
            fit(ticking(clock, 1))
        assert terminal.cursor_visible
        assert terminal.text.split("\n")[-1] == "mine"


class TestWhenItDraws:
    def test_the_sanity_check_and_the_training_share_one_display(self, terminal: Terminal, clock: Clock):
        fit(ticking(clock, 1), loader(3), loader(2), max_epochs=2, num_sanity_val_steps=2)
        assert terminal.sent.count("\x1b[?25l") == 1  # a notebook would show a widget for each
        assert "Sanity" in terminal.sent
        assert "Sanity" not in terminal.text

    def test_it_draws_by_the_clock(self, terminal: Terminal, clock: Clock):
        fit(ticking(clock, 0.0625), loader(32), bar=(bar := Recording(clock, refresh_seconds=0.2)))
        # At the start, after the first batch, every fourth batch from there, and at the end.
        assert bar.times == [0, *(0.0625 + 0.25 * n for n in range(8)), 2.0]

    def test_many_short_epochs_and_validations_draw_no_more(self, terminal: Terminal, clock: Clock):
        bar = Recording(clock, refresh_seconds=0.2)
        fit(ticking(clock, 0.001), loader(2), loader(1), bar=bar, max_epochs=50, num_sanity_val_steps=0)
        # 50 epochs of 3 ms: at the start, at its first changes, after the first batch, at the end.
        assert len(bar.times) == 6
        assert bar.times[-1] == 0.15

    def test_the_start_of_every_epoch_is_drawn_up_to_four_in_an_interval(self, terminal: Terminal, clock: Clock):
        bar = Recording(clock, refresh_seconds=0.25)
        fit(ticking(clock, 0.0625), loader(1), bar=bar, max_epochs=8)
        assert set(bar.times) == {0.0625 * n for n in range(9)}

    def test_values_that_wait_for_no_device_are_preferred(self, terminal: Terminal, clock: Clock):
        class Offering(L.Trainer):
            @property
            def progress_bar_values(self) -> dict[str, float]:
                return {"offered": 7.0}

            @property
            def progress_bar_metrics(self) -> dict[str, float]:
                raise AssertionError("reading these waits for the device")

        fit(ticking(clock, 1), cls=Offering)
        assert terminal.text.endswith("offered 7.000")

    @pytest.mark.parametrize(("leave", "waiting"), [(False, [6.0]), (True, [3.0, 6.0])])
    def test_only_a_line_that_stays_waits_for_its_values(
        self, terminal: Terminal, clock: Clock, monkeypatch: pytest.MonkeyPatch, leave: bool, waiting: list[float]
    ):
        waited: list[float] = []

        class Watched(LatestValues):
            def read(self, values: Any, *, wait: bool = False) -> dict[str, Any]:
                waited.extend([clock() - 1000] * wait)
                return read(self, values, wait=wait)

        read = LatestValues.read
        monkeypatch.setattr(LatestValues, "read", Watched.read)
        fit(ticking(clock, 1), bar=ProgressBar(leave=leave), max_epochs=2)
        assert waited == waiting

    def test_a_subclass_chooses_what_is_shown(self, terminal: Terminal, clock: Clock):
        class Own(ProgressBar):
            @property
            def train_description(self) -> str:
                return "Pretraining"

            def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
                return {**super().get_metrics(trainer, pl_module), "lr": "[1e-2]"}

        fit(ticking(clock, 1), loader(2), bar=Own())
        assert terminal.text == f"Pretraining  {'━' * 30}  2/2  1.00 it/s  0:02  loss 1.000  late 100.0  lr [1e-2]"


class TestWithoutATerminal:
    def test_plain_lines_by_the_clock_and_at_each_epochs_end(self, plain: io.StringIO, clock: Clock):
        fit(ticking(clock, 1), loader(6), loader(3), bar=ProgressBar(plain_seconds=4), max_epochs=2)
        assert plain.getvalue().split("\n") == [
            "Epoch 1/2: 5/6 batches, 1.00 it/s, 0:05, 0:01 left, loss 4.000",
            "Validation: 3/3 batches, 1.00 it/s, 0:03, 0:00 left, loss 5.000",
            "Epoch 1/2: 6/6 batches, 1.00 it/s, 0:06, loss 5.000, val_loss 10.00, late 100.0",
            "Epoch 2/2: 4/6 batches, 1.00 it/s, 0:04, 0:02 left, loss 9.000, val_loss 10.00, late 100.0",
            "Validation: 2/3 batches, 1.00 it/s, 0:02, 0:01 left, loss 11.00, val_loss 10.00, late 100.0",
            "Epoch 2/2: 6/6 batches, 1.00 it/s, 0:06, loss 11.00, val_loss 11.00, late 101.0",
            "",
        ]

    @pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
    def test_a_file_gets_no_cursor_codes_where_colours_are_forced(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch, variable: str
    ):
        monkeypatch.setenv(variable, "1")
        file = io.StringIO()
        console = rich.console.Console(file=file)
        monkeypatch.setattr(rich, "get_console", lambda: console)
        trainer(callbacks=[ProgressBar(), RunSummary()], max_epochs=2).fit(
            Small(ticking(clock, 1)), loader(3), loader(2)
        )
        text = file.getvalue()
        assert "Epoch 2/2: 3/3 batches" in text
        assert not re.search(r"\x1b\[[?0-9;]*[A-LN-Za-ln-z]", text)  # an m alone is a colour

    def test_printing_is_left_to_python(self, plain: io.StringIO, clock: Clock, capsys: pytest.CaptureFixture[str]):
        fit(lambda module, stage, batch_idx: module.print("step", batch_idx, sep="=", end=";"))
        assert capsys.readouterr().out == "step=0;step=1;step=2;"


class TestPrinting:
    def test_what_is_printed_stands_above_the_bar(self, terminal: Terminal, clock: Clock):
        screens: list[str] = []

        def step(module: Any, stage: str, batch_idx: int) -> None:
            clock.tick(1)
            if batch_idx == 1:
                module.print("by the module:", "[red]as it is[/red]", 1.5, sep=" ")
                module.print("no newline", end="")
                print("by Python")
                print("an error", file=sys.stderr)
                module.print("x" * 150)
                screens.append(terminal.text)

        fit(step)
        bar = "Epoch 1/1  ━━━━━━━━━━────────────────────  1/3  1.00 it/s  0:01<0:02  loss 0.000"
        printed = ["by the module: [red]as it is[/red] 1.5", "no newline", "by Python", "an error", "x" * 150]
        assert screens == ["\n".join([*printed, bar.replace("0.000", "0.0")])]
        assert terminal.text.split("\n")[:-1] == printed
        assert terminal.text.split("\n")[-1].startswith("Epoch 1/1")
        assert [line.strip("x") for line in terminal.wrapped] == [""]

    def test_what_is_logged_stands_above_the_bar(self, terminal: Terminal, clock: Clock):
        streams = [sys.stderr, io.StringIO()]
        handlers = [logging.StreamHandler(stream) for stream in streams]
        logger = logging.getLogger("equipoise")
        step = lambda module, stage, batch_idx: logger.error("logged %d", batch_idx)  # noqa: E731
        for handler in handlers:
            logger.addHandler(handler)
        try:
            fit(step, loader(2))
            assert [handler.stream for handler in handlers] == streams
        finally:
            for handler in handlers:
                logger.removeHandler(handler)
        assert terminal.text.split("\n")[:2] == ["logged 0", "logged 1"]
        assert terminal.text.split("\n")[2].startswith("Epoch 1/1")
        assert streams[1].getvalue() == "logged 0\nlogged 1\n"

    def test_a_file_and_the_time_before_a_run_are_pythons(
        self, terminal: Terminal, clock: Clock, capsys: pytest.CaptureFixture[str]
    ):
        bar, file = ProgressBar(), io.StringIO()
        bar.print("before", sep=None, end=None)
        assert capsys.readouterr().out == "before\n"
        fit(lambda module, stage, batch_idx: module.print(batch_idx, file=file, flush=True), loader(2), bar=bar)
        assert file.getvalue() == "0\n1\n"
        assert "\n" not in terminal.text


def test_the_trainers_own_print_goes_above_the_bar(terminal: Terminal, clock: Clock):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        fit(lambda module, stage, batch_idx: module.trainer.print("said", batch_idx), loader(2))
    assert out.getvalue() == ""
    assert terminal.text.split("\n")[:2] == ["said 0", "said 1"]
