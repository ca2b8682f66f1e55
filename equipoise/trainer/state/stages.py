"""The run stage of a trainer: training, validating, sanity checking, testing, predicting."""

from dataclasses import dataclass, field

from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus

from equipoise.trainer.state.sent_state import RESULT

__all__ = ["Stages"]


@dataclass
class Stages:
    """The entry point that runs, its stage, and how it ended.

    Attributes:
        status: Lightning's object for these three; users and callbacks read and write it as `trainer.state`.
    """

    status: TrainerState = field(default_factory=TrainerState, metadata=RESULT)

    @property
    def fitting(self) -> bool:
        """True while `fit` runs, and after it; also during its sanity check and its validations."""
        return self.status.fn == TrainerFn.FITTING

    @property
    def training(self) -> bool:
        """True while training runs."""
        return self.status.stage == RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        self._set_stage(RunningStage.TRAINING, value)

    @property
    def validating(self) -> bool:
        """True while validation runs, inside a fit or by itself."""
        return self.status.stage == RunningStage.VALIDATING

    @validating.setter
    def validating(self, value: bool) -> None:
        self._set_stage(RunningStage.VALIDATING, value)

    def begin_validation(self) -> None:
        """Enter a validation inside a fit."""
        self.validating = True

    def end_validation(self) -> None:
        """Go back to training."""
        self.training = True

    @property
    def testing(self) -> bool:
        """True while a test runs."""
        return self.status.stage == RunningStage.TESTING

    @testing.setter
    def testing(self, value: bool) -> None:
        self._set_stage(RunningStage.TESTING, value)

    @property
    def predicting(self) -> bool:
        """True while prediction runs."""
        return self.status.stage == RunningStage.PREDICTING

    @predicting.setter
    def predicting(self, value: bool) -> None:
        self._set_stage(RunningStage.PREDICTING, value)

    @property
    def sanity_checking(self) -> bool:
        """True while the few validation batches before training run."""
        return self.status.stage == RunningStage.SANITY_CHECKING

    @sanity_checking.setter
    def sanity_checking(self, value: bool) -> None:
        self._set_stage(RunningStage.SANITY_CHECKING, value)

    def _set_stage(self, stage: RunningStage, value: bool) -> None:
        if value:
            self.status.stage = stage
        elif self.status.stage == stage:
            self.status.stage = None

    @property
    def evaluating(self) -> bool:
        """True while validation or a test runs."""
        return self.status.stage is not None and self.status.stage.evaluating

    @property
    def interrupted(self) -> bool:
        """True if the last run failed or was interrupted."""
        return self.status.status == TrainerStatus.INTERRUPTED
