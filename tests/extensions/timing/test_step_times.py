"""Each second of a run belongs to one part, whatever contains what."""

import io
import pickle
from typing import Any

import lightning as L
import pytest
import rich
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from rich.console import Console
from torch import Tensor

import equipoise
from equipoise import RunSummary, StepTimes
from equipoise.extensions.report.added_sections import added_sections
from equipoise.extensions.report.page.sections import added_section
from equipoise.extensions.timing import step_times
from equipoise.extensions.timing.clock import FIRST_STEPS
from tests.extensions.common.page.parsing import parse
from tests.extensions.timing.programs import FIRST, STEPS, Slow, Ticking, Validated, fit, loader
from tests.support.callback_runs import Clock
from tests.support.trainer_runs import trainer


def parts_of(times: StepTimes) -> dict[str, float]:
    """Return the parts that took time."""
    assert sum(times.times.parts.values()) == times.times.seconds
    return {name: seconds for name, seconds in times.times.parts.items() if seconds}


def test_the_parts_of_a_step(clock: Clock) -> None:
    times, _ = fit(Ticking(clock), loader(clock, 0.25), callbacks=[Slow(clock, 4.0, before_step=8.0)])
    steps = STEPS - FIRST
    assert parts_of(times) == {
        "waiting for data": 0.25 * steps,
        "forward": 1.0 * steps,
        "backward": 2.0 * steps,
        "optimiser": 0.5 * steps,
        "callback Slow": 12.0 * steps,
    }
    assert times.times.steps == steps
    assert times.times.first_seconds == FIRST_STEPS * 15.75
    assert times.times.step_seconds() == 15.75


def test_validations_and_checkpoints_are_parts(clock: Clock, tmp_path: Any) -> None:
    """A checkpoint that is saved within a validation is no part of it."""

    class SlowCheckpoint(ModelCheckpoint):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            clock.tick(16.0)
            super().on_validation_end(trainer, pl_module)

    module = Validated(clock, validation=4.0)
    checkpoint = SlowCheckpoint(tmp_path, save_on_train_epoch_end=False)
    options = {"enable_checkpointing": True, "val_check_interval": 8}
    times, _ = fit(module, loader(clock), loader(clock, samples=2), callbacks=[checkpoint], **options)
    parts = parts_of(times)
    assert parts["validation"] == 3 * 2 * 4.0
    assert parts["checkpoints"] == 3 * 16.0
    assert times.times.step_seconds() == 3.5


def test_parts_with_accumulation(clock: Clock) -> None:
    times, _ = fit(Ticking(clock), loader(clock), accumulate_grad_batches=4)
    steps = STEPS - FIRST
    assert parts_of(times) == {"forward": steps * 1.0, "backward": steps * 2.0, "optimiser": STEPS / 4 * 0.5}


def test_parts_of_a_step_with_a_closure(clock: Clock) -> None:
    """The optimiser's step contains forward and backward."""

    class Closure(Ticking):
        def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
            clock.tick(32.0)
            optimizer.step(closure=optimizer_closure)

    times, _ = fit(Closure(clock), loader(clock))
    steps = STEPS - FIRST
    assert parts_of(times) == {"forward": steps * 1.0, "backward": steps * 2.0, "optimiser": steps * 32.5}


def test_parts_of_steps_by_hand(clock: Clock) -> None:
    """The forward contains the backward; steps of the optimiser stay with the user's step."""

    class ByHand(Ticking):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    times, _ = fit(ByHand(clock), loader(clock), callbacks=[Slow(clock, 4.0, before_step=8.0)])
    steps = STEPS - FIRST
    assert parts_of(times) == {
        "forward": steps * 1.5,
        "backward": steps * 2.0,
        "callback Slow": steps * 12.0,
    }


def test_parts_of_several_devices_are_one_part(clock: Clock) -> None:
    """The forward is that of all replicas."""
    times, _ = fit(Ticking(clock), loader(clock, batch_size=2, samples=2 * STEPS), strategy="dp", devices=2)
    steps = STEPS - FIRST
    assert parts_of(times) == {"forward": steps * 2.0, "backward": steps * 4.0, "optimiser": steps * 0.5}


def test_shares_of_an_epoch_are_logged(clock: Clock) -> None:
    class Varying(Ticking):
        def on_train_epoch_start(self) -> None:
            self.seconds["forward"] = 1.0 + 4.0 * self.current_epoch

    _, run = fit(Varying(clock, step=0.0), loader(clock), max_epochs=3, log=True)
    logged = run.callback_metrics
    assert logged["time/forward"].item() == pytest.approx(9 / 11)
    assert logged["time/backward"].item() == pytest.approx(2 / 11)
    assert logged["time/waiting_for_data"].item() == 0


def test_a_short_run_has_no_times(clock: Clock) -> None:
    times, run = fit(Ticking(clock), loader(clock, samples=FIRST))
    assert times.times is None
    assert times.limit is None
    assert "time of a step" not in run.summary_rows


def test_there_are_no_times_under_lightnings_trainer(clock: Clock) -> None:
    """It does not call `wrap_call`."""
    times = StepTimes(log=True)
    run = trainer(L.Trainer, callbacks=[times], max_epochs=1)
    run.fit(Ticking(clock), loader(clock))
    assert times.times is None
    assert times.limit is None


def test_a_failed_run_has_times(clock: Clock) -> None:
    class Failing(Ticking):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            if batch_idx == 10:
                raise ArithmeticError
            return super().training_step(batch, batch_idx)

    times = StepTimes()
    run = trainer(callbacks=[times])
    with pytest.raises(ArithmeticError):
        run.fit(Failing(clock), loader(clock))
    assert parts_of(times)["backward"] == 7 * 2.0


def test_a_second_fit_begins_anew(clock: Clock) -> None:
    times, run = fit(Ticking(clock), loader(clock))
    run.fit_loop.max_epochs = 2
    run.fit(Ticking(clock, forward=64.0), loader(clock))
    assert parts_of(times)["forward"] == 64.0 * (STEPS - FIRST)


def test_the_callback_can_be_copied(clock: Clock) -> None:
    times, _ = fit(Ticking(clock), loader(clock))
    copied = pickle.loads(pickle.dumps(times))
    assert copied.times == times.times


def test_times_are_shown_in_the_summary_and_the_report(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    times, run = fit(Ticking(clock), loader(clock, 8.0), callbacks=[RunSummary()])
    text = capsys.readouterr().out
    assert "waiting for data 70%, backward 17%, forward 9%, optimiser 4%" in " ".join(text.split())
    assert "time of a step" in text
    assert times.limit.startswith("70% of the time is spent waiting for data: the loader has num_workers=0: try")
    (section,) = added_sections(run, run.lightning_module)
    assert section.title == "Time"
    assert ("backward", "17.4%", "42 s") in [tuple(row) for row in section.table]
    assert times.limit in section.text
    assert section.lines == {}  # one epoch has no chart


# The progress bar.


@pytest.mark.parametrize(("seconds", "word"), [(3.5, {"data": "late 50%"}), (0.5, {})])
def test_a_word_where_data_are_late(clock: Clock, seconds: float, word: Any) -> None:
    """Each look counts from the one before, and there is none in the first steps."""
    times = StepTimes()
    shown = []

    def look(*arguments: Any) -> None:
        batch_idx = arguments[-1]
        if batch_idx % 3 == 2:
            shown.append(times.progress_values())

    run = trainer(callbacks=[times, LambdaCallback(on_train_batch_end=look)])
    run.fit(Ticking(clock), loader(clock, seconds))
    assert shown == [{}] + [word] * 7
    assert times.progress_values() == {}


def test_the_progress_bar_shows_data_late(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr(rich, "get_console", lambda: Console(file=output, width=160))
    bar = equipoise.ProgressBar()
    run = trainer(callbacks=[StepTimes(), bar], enable_progress_bar=True, max_epochs=2)
    run.fit(Ticking(clock), loader(clock, 3.5))
    assert "data late 50%" in output.getvalue()


# The report.


def test_the_report_stacks_the_parts_of_epochs(clock: Clock, tmp_path: Any) -> None:
    """The lines are upper borders: waiting 3.5 of 7 seconds, then backward 2, forward 1 and the optimiser 0.5."""
    times, run = fit(Ticking(clock), loader(clock, 3.5), max_epochs=3)
    (section,) = [each for each in added_sections(run, run.lightning_module) if each.title == "Time"]
    borders = {"waiting for data": 50.0, "backward": 550 / 7, "forward": 650 / 7, "optimiser": 100.0}
    for name, height in borders.items():
        assert [step for step, _ in section.lines[name]] == [24, 48, 72]
        assert [y for _, y in section.lines[name]] == pytest.approx([height] * 3, rel=1e-12)
    figure = parse(str(added_section(section))).one("figure")
    assert "waiting for data, backward, forward, optimiser" in figure.text
    assert len(times.history) == 3


def test_the_history_of_a_long_run_is_thinned(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "_MOST_EPOCHS", 4)
    times, _ = fit(Ticking(clock), loader(clock, samples=4), max_epochs=7)
    assert [step for step, _ in times.history] == [8, 16, 24, 28]
