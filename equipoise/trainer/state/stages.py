"""The run stage of a trainer: training, validating, sanity checking, testing, predicting."""

from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus

from equipoise.trainer.state.sent_state import RESULT

__all__ = ["Stages"]

# The first stage of each entry point.
_FIRST_STAGE = {
    TrainerFn.FITTING: RunningStage.TRAINING,
    TrainerFn.VALIDATING: RunningStage.VALIDATING,
    TrainerFn.TESTING: RunningStage.TESTING,
    TrainerFn.PREDICTING: RunningStage.PREDICTING,
}


def _stage(stage: RunningStage, text: str) -> Any:
    """Return a property: whether a stage runs. True enters it, and False leaves it."""

    def runs(state: "Stages") -> bool:
        return state.status.stage == stage

    def switch(state: "Stages", value: bool) -> None:
        state.switch(stage, value)

    return property(runs, switch, doc=text)


@dataclass
class Stages:
    """The entry point that runs, its stage, and how it ended.

    Attributes:
        status: Lightning's object for these three; users and callbacks read and write it as `trainer.state`.
    """

    status: TrainerState = field(default_factory=TrainerState, metadata=RESULT)

    # A run.

    def begin(self, fn: TrainerFn) -> None:
        """Begin a run in the first stage of its entry point."""
        self._set(fn=fn, status=TrainerStatus.RUNNING, stage=_FIRST_STAGE[fn])

    def finish(self) -> None:
        """End a run that came to its end."""
        self._set(status=TrainerStatus.FINISHED, stage=None)

    def interrupt(self) -> None:
        """Note that a run has failed; it stays in its stage until everything is released."""
        self._set(status=TrainerStatus.INTERRUPTED)

    def leave(self) -> None:
        """Leave the stage of a run that has failed."""
        self._set(stage=None)

    def _set(self, **values: Any) -> None:
        # The object stays the same, since users may hold it.
        for name, value in values.items():
            setattr(self.status, name, value)

    def switch(self, stage: RunningStage, on: bool) -> None:
        """Enter a stage, or leave it."""
        if on:
            self._set(stage=stage)
        # Another stage may have begun in the meantime.
        elif self.status.stage == stage:
            self._set(stage=None)

    # Its stage.

    @property
    def fitting(self) -> bool:
        """True while `fit` runs, and after it; also during its sanity check and its validations."""
        return self.status.fn == TrainerFn.FITTING

    training = _stage(RunningStage.TRAINING, "True while training runs.")
    validating = _stage(RunningStage.VALIDATING, "True while validation runs, inside a fit or by itself.")
    testing = _stage(RunningStage.TESTING, "True while a test runs.")
    predicting = _stage(RunningStage.PREDICTING, "True while prediction runs.")
    sanity_checking = _stage(RunningStage.SANITY_CHECKING, "True while the few validation batches before training run.")

    def begin_validation(self) -> None:
        """Enter a validation inside a fit."""
        self.validating = True

    def end_validation(self) -> None:
        """Go back to training."""
        self.training = True

    @property
    def evaluating(self) -> bool:
        """True while validation or a test runs."""
        stage = self.status.stage
        return stage is not None and stage.evaluating

    @property
    def interrupted(self) -> bool:
        """True if the last run failed or was interrupted."""
        return self.status.status == TrainerStatus.INTERRUPTED
