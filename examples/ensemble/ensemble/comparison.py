"""A callback that compares the members with the mean of their probabilities."""

from pathlib import Path
from typing import Any

from torch import Tensor

from ensemble.module import Classifier, measures
from equipoise import Callback, ConfigurationError, Trainer

__all__ = ["MemberComparison"]

_MEAN = "mean_probabilities"
_HEIGHT = 24
# Pixels for each percent of wrong digits.
_SCALE = 40


class MemberComparison(Callback):
    """Measures the mean of the members' probabilities as they are measured, and shows all of them.

    It logs `test_accuracy/mean_probabilities` and the like, prints a table, and draws the errors as `members.svg` in
    the folder of the run.
    """

    def setup(self, trainer: Trainer, pl_module: Classifier, stage: str) -> None:
        """Refuses a strategy without members."""
        if not hasattr(trainer.strategy, "members"):
            raise ConfigurationError(
                "MemberComparison compares the members of an ensemble: choose strategy=ensemble, or leave the callback"
                " out by ~callbacks.member_comparison."
            )

    def on_test_epoch_start(self, trainer: Trainer, pl_module: Classifier) -> None:
        """Begins anew."""
        self._measures = measures()

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: Classifier,
        outputs: Tensor,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Counts a batch. Under `EnsembleStrategy` the outputs are the mean of those of the members."""
        for metric in self._measures.values():
            metric.update(outputs.cpu(), batch[1].cpu())

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Classifier) -> None:
        """Logs the values of the mean beside those of the members."""
        for name, metric in self._measures.items():
            pl_module.log(f"{name}/{_MEAN}", metric.compute())

    def on_test_end(self, trainer: Trainer, pl_module: Classifier) -> None:
        """Prints the table and writes the picture."""
        names = [f"member_{index}" for index in range(trainer.strategy.members)]
        errors = {}
        trainer.print(f"{'':20} accuracy  calibration error")
        for name in [*names, _MEAN]:
            accuracy, calibration_error = (float(trainer.callback_metrics[f"{key}/{name}"]) for key in self._measures)
            errors[name] = 100 * (1 - accuracy)
            trainer.print(f"{name:20} {accuracy:8.4f}  {calibration_error:17.4f}")
        path = Path(trainer.log_dir or trainer.default_root_dir, "members.svg")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_bars(errors), encoding="utf-8")


def _bars(errors: dict[str, float]) -> str:
    """Returns a drawing with a bar for each error, in percent."""
    lines = ['<text x="160" y="16">wrong digits in percent</text>']
    for index, (name, error) in enumerate(errors.items(), start=1):
        top = index * _HEIGHT
        length = _SCALE * error
        colour = "#d97706" if name == _MEAN else "#4b7bb5"
        lines += [
            f'<text x="150" y="{top + 16}" text-anchor="end">{name}</text>',
            f'<rect x="160" y="{top + 3}" width="{length:.1f}" height="18" fill="{colour}"/>',
            f'<text x="{168 + length:.1f}" y="{top + 16}">{error:.2f}</text>',
        ]
    width, height = 220 + _SCALE * max(errors.values()), _HEIGHT * (len(errors) + 1)
    style = f'width="{width:.0f}" height="{height}" font-family="sans-serif" font-size="13" fill="#888"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {style}>\n' + "\n".join(lines) + "\n</svg>\n"
