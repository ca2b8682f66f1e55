"""Drawing: the lines of a run's present stages, on a display."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from equipoise.callbacks.progress.display import Display
from equipoise.callbacks.progress.latest_values import LatestValues
from equipoise.callbacks.progress.layout import Layout, Metrics, plain_line
from equipoise.callbacks.progress.track import Track

__all__ = ["Drawing"]

# Changes that are drawn immediately in one refresh interval; further changes wait for the next redraw.
_IMMEDIATE_CHANGES = 4


class Drawing:
    """Lines of the present stages. They exist while there is something to draw.

    All times are seconds of one clock.

    Args:
        trainer: The trainer, for `get_metrics`.
        module: The user's module, likewise.
        display: Display that shows the lines.

    Attributes:
        values: Reads the metrics.
        fitting: True once training has started.
        awaits_first_batch: True until the first batch of the fit is done. Its index shows where a resumed epoch begins.
        epoch: Track of the epoch; None outside of one.
        evaluation: Track of a validation inside the epoch, or of a stage by itself; None outside of one.
    """

    def __init__(self, trainer: Any, module: Any, display: Display) -> None:
        self.trainer = trainer
        self.module = module
        self.display = display
        self.values = LatestValues()
        self.fitting = False
        self.awaits_first_batch = True
        self.epoch: Track | None = None
        self.evaluation: Track | None = None
        self._layout = Layout(ascii_only=display.ascii_only)
        # Description of the evaluation, and number of batches of each of its loaders.
        self._description = ""
        self._totals: list[float] = []
        # Times of the last changes that were drawn immediately.
        self._changes: deque[float] = deque(maxlen=_IMMEDIATE_CHANGES)

    # Tracks

    def start_fit(self) -> None:
        """Note that training has started."""
        self.fitting = True

    def begin_epoch(self, epoch: Track) -> None:
        """Set the track of a new epoch."""
        self.epoch = epoch

    def note_first_batch(self) -> None:
        """Note that the first batch of the fit is done."""
        self.awaits_first_batch = False

    def resume_epoch(self, epoch: Track, done: int, now: float) -> None:
        """Set the track of a resumed epoch, of which batches were done before this fit."""
        epoch.skip(done, now)
        self.epoch = epoch

    def begin_evaluation(self, description: str, totals: Sequence[float], now: float) -> None:
        """Set the track of an evaluation, and stop the clock of the epoch."""
        if self.epoch is not None:
            self.epoch.pause(now)
        self._description = description
        self._totals = list(totals)
        self._begin_loader(0, now)

    def change_loader(self, loader: int, done: int, now: float) -> None:
        """Set the track of another loader, of which batches are done already."""
        evaluation = self._begin_loader(loader, now)
        evaluation.skip(done, now)

    def _begin_loader(self, loader: int, now: float) -> Track:
        label = self._description
        loaders = len(self._totals)
        if loaders > 1:
            label += f" {loader + 1}/{loaders}"
        # The columns of a validation stand below those of its epoch.
        if self.epoch is not None:
            width = len(self.epoch.label)
            label = label.ljust(width)
        total = self._totals[loader]
        self.evaluation = Track(label, total, now)
        return self.evaluation

    def end_evaluation(self, now: float) -> None:
        """Remove the track of an evaluation, and start the clock of the epoch again."""
        self.evaluation = None
        if self.epoch is not None:
            self.epoch.resume(now)

    def update(self, train_batches: int, evaluation_batches: int, now: float) -> None:
        """Set the numbers of batches done in the epoch and in the evaluation."""
        if self.epoch is not None:
            self.epoch.update(train_batches, now)
        if self.evaluation is not None:
            self.evaluation.update(evaluation_batches, now)

    # Lines

    def show(self, metrics: Metrics, now: float) -> None:
        """Draw the tracks, outermost first; without an animated display write the innermost as one line."""
        tracks = []
        if self.epoch is not None:
            tracks.append(self.epoch)
        if self.evaluation is not None:
            tracks.append(self.evaluation)
        if self.display.animated:
            lines = self._compose(tracks, metrics, now)
            self.display.show(lines)
        else:
            innermost = tracks[-1]
            self._write_line(innermost, metrics, now)

    def keep_epoch(self, epoch: Track, metrics: Metrics, now: float) -> None:
        """Write the line of an epoch that has ended, so that it stays, and remove the tracks."""
        if self.display.animated:
            lines = self._compose([epoch], metrics, now)
            self.display.keep(lines)
        else:
            self._write_line(epoch, metrics, now)
        self.epoch = None
        self.evaluation = None

    def _compose(self, tracks: Sequence[Track], metrics: Metrics, now: float) -> Text:
        width = self.display.console.width
        return self._layout.compose(tracks, metrics, width=width, now=now)

    def _write_line(self, track: Track, metrics: Metrics, now: float) -> None:
        line = plain_line(track, metrics, now=now)
        self.display.write(f"{line}\n")

    def draws_change(self, now: float, interval: float, *, at_once: bool) -> bool:
        """Return True if the start or end of a stage is drawn without waiting for the next redraw.

        The next batch may take long. Where epochs are short, most changes wait.

        Args:
            now: The present time.
            interval: Seconds between two redraws.
            at_once: Draw it even if there were many changes within the interval.
        """
        if not self.display.animated:
            return False
        changes = self._changes
        if len(changes) == _IMMEDIATE_CHANGES and not at_once:
            since_oldest = now - changes[0]
            if since_oldest < interval:
                return False
        changes.append(now)
        return True
