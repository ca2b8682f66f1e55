"""A bar's life: nothing of it is left behind, it can be copied, switched off and on, and draws in one process only."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import rich
from rich.live import Live

import equipoise
from equipoise.callbacks.progress.progress_bar import ProgressBar
from equipoise.errors import ConfigurationError
from tests.support.callback_runs import Clock, Small, loader, ticking, trainer
from tests.support.pairs import pairwise
from tests.support.terminal import Terminal


class TestNothingIsLeftBehind:
    """The fixture `surroundings` compares threads and streams after every test; these look closer."""

    @pytest.mark.parametrize(
        ("stage", "cls", "error"),
        pairwise(
            ["train", "val", "sanity", "test", "predict"],
            [L.Trainer, equipoise.Trainer],
            [ValueError, KeyboardInterrupt],
        ),
    )
    def test_a_failure_gives_the_terminal_back(
        self, terminal: Terminal, clock: Clock, stage: str, error: type[BaseException], cls: type
    ):
        def step(module: Any, now: str, batch_idx: int) -> None:
            clock.tick(1)
            assert not terminal.cursor_visible
            assert threading.active_count() == threads
            if now == {"sanity": "val"}.get(stage, stage) and batch_idx == 1:
                raise error("stop")

        threads, sanity = threading.active_count(), 2 if stage == "sanity" else 0
        run = trainer(cls, callbacks=[ProgressBar()], max_epochs=1, num_sanity_val_steps=sanity)
        loaders = (loader(3),) if stage in ("test", "predict") else (loader(3), loader(3))
        with pytest.raises((SystemExit, error)):  # Lightning's trainer leaves the program after an interrupt
            {"test": run.test, "predict": run.predict}.get(stage, run.fit)(Small(step), *loaders)
        assert terminal.cursor_visible
        last = terminal.text.split("\n")[-1]
        labels = {"train": "Epoch 1/1", "val": "Validation", "test": "Testing", "predict": "Predicting"}
        assert last.startswith(labels.get(stage, "Sanity"))
        assert "1/3" in last or "1/2" in last
        with Live("next", console=rich.get_console(), auto_refresh=False):
            assert not terminal.cursor_visible, "a display of the bar's is still active"
        assert terminal.text.endswith("\nnext")

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda bar: pickle.loads(pickle.dumps(bar))])
    def test_copies_can_be_made_before_during_and_after_a_run(
        self, terminal: Terminal, clock: Clock, copied: Callable[[ProgressBar], ProgressBar]
    ):
        bar = ProgressBar(refresh_seconds=0.5, plain_seconds=3, leave=True)
        copies = [copied(bar)]
        step = lambda module, stage, batch_idx: copies.append(copied(bar))  # noqa: E731
        trainer(callbacks=[bar], max_epochs=1).fit(Small(step), loader(2))
        copies.append(copied(bar))
        shown = terminal.text
        for other in copies:
            assert (other.refresh_seconds, other.plain_seconds, other.leave, other.is_enabled) == (0.5, 3, True, True)
            other.teardown(None, None, "fit")
        assert terminal.text == shown
        trainer(callbacks=[copies[1]], max_epochs=1).fit(Small(), loader(2))
        assert len(terminal.text.split("\n")) == 2


class TestOnAndOff:
    def test_disabled_it_draws_nothing_and_enabled_it_draws_again(self, terminal: Terminal, clock: Clock):
        bar = ProgressBar()
        bar.disable()
        run = trainer(callbacks=[bar], max_epochs=1)
        run.fit(Small(ticking(clock, 1)), loader(3), loader(2))
        run.test(Small(), [loader(1), loader(1)], verbose=False)
        assert (terminal.sent, bar.is_enabled) == ("", False)
        bar.enable()
        run.validate(Small(ticking(clock, 1)), loader(2), verbose=False)
        assert terminal.text.startswith("Validation")

    def test_disabled_in_the_middle_it_is_gone(self, terminal: Terminal, clock: Clock):
        bar = ProgressBar()

        def step(module: Any, stage: str, batch_idx: int) -> None:
            clock.tick(1)
            if batch_idx == 2:
                assert terminal.text or not bar.is_enabled
                bar.disable()
                assert terminal.cursor_visible

        trainer(callbacks=[bar], max_epochs=2).fit(Small(step), loader(5), loader(2))
        assert terminal.text == ""

    def test_only_the_main_process_draws(self, terminal: Terminal, clock: Clock):
        class Second(L.Trainer):
            is_global_zero = False

        trainer(Second, callbacks=[bar := ProgressBar()], max_epochs=1).fit(
            Small(ticking(clock, 1)), loader(3), loader(2)
        )
        assert (terminal.sent, bar.is_enabled) == ("", False)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("refresh_seconds", value) for value in (0, float("inf"), float("nan"), "0.2", True)),
            ("plain_seconds", 0),
        ],
    )
    def test_an_interval_that_is_no_positive_number_is_refused(self, name: str, value: Any):
        with pytest.raises(
            ConfigurationError, match=rf"{name}=.* positive number .* {value!r} .*enable_progress_bar=False"
        ):
            ProgressBar(**{name: value})
