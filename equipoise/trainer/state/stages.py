"""The run stage of a trainer: training, validating, sanity checking, testing, predicting."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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


class _Stage(property):
    """Whether a stage runs. True enters it, and False leaves it.

    Args:
        stage: The stage.
        text: Its meaning, for users.
    """

    def __init__(self, stage: RunningStage, text: str) -> None:
        def runs(state: "Stages") -> bool:
            return state.status.stage == stage

        def set_stage(state: "Stages", value: bool) -> None:
            if value:
                state.status.stage = stage
            # Another stage may have begun in the meantime.
            elif state.status.stage == stage:
                state.status.stage = None

        super().__init__(runs, set_stage, doc=text)

    if TYPE_CHECKING:

        def __get__(self, instance: Any, owner: type | None = None, /) -> bool: ...  # type: ignore[override]


@dataclass
class Stages:
    """The entry point that runs, its stage, and how it ended.

    Attributes:
        status: Lightning's object for these three; users and callbacks read and write it as `trainer.state`,
            and may hold it, so it stays the same object.
    """

    status: TrainerState = field(default_factory=TrainerState, metadata=RESULT)

    # A run.

    def begin(self, fn: TrainerFn) -> None:
        """Begin a run in the first stage of its entry point."""
        self.status.fn = fn
        self.status.status = TrainerStatus.RUNNING
        self.status.stage = _FIRST_STAGE[fn]

    def finish(self) -> None:
        """End a run that came to its end."""
        self.status.status = TrainerStatus.FINISHED
        self.status.stage = None

    def interrupt(self) -> None:
        """Note that a run has failed; it stays in its stage until everything is released."""
        self.status.status = TrainerStatus.INTERRUPTED

    def leave(self) -> None:
        """Leave the stage of a run that has failed."""
        self.status.stage = None

    # Its stage.

    @property
    def fitting(self) -> bool:
        """True while `fit` runs, and after it; also during its sanity check and its validations."""
        return self.status.fn == TrainerFn.FITTING

    training = _Stage(RunningStage.TRAINING, "True while training runs.")
    validating = _Stage(RunningStage.VALIDATING, "True while validation runs, inside a fit or by itself.")
    testing = _Stage(RunningStage.TESTING, "True while a test runs.")
    predicting = _Stage(RunningStage.PREDICTING, "True while prediction runs.")
    sanity_checking = _Stage(RunningStage.SANITY_CHECKING, "True while the few validation batches before training run.")

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
