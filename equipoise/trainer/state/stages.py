"""The run stage of a trainer: training, validating, sanity checking, testing, predicting."""

from lightning.pytorch.trainer.states import RunningStage, TrainerState, TrainerStatus

__all__ = ["Stages"]


class Stages:
    """The stage of a trainer.

    Attributes:
        state: Which of `fit`, `validate`, `test`, `predict` runs, in which stage, and how it ended.
    """

    state: TrainerState

    @property
    def training(self) -> bool:
        """True while training runs."""
        return self.state.stage == RunningStage.TRAINING

    @training.setter
    def training(self, value: bool) -> None:
        self._set_stage(RunningStage.TRAINING, value)

    @property
    def validating(self) -> bool:
        """True while validation runs, inside a fit or by itself."""
        return self.state.stage == RunningStage.VALIDATING

    @validating.setter
    def validating(self, value: bool) -> None:
        self._set_stage(RunningStage.VALIDATING, value)

    @property
    def testing(self) -> bool:
        """True while a test runs."""
        return self.state.stage == RunningStage.TESTING

    @testing.setter
    def testing(self, value: bool) -> None:
        self._set_stage(RunningStage.TESTING, value)

    @property
    def predicting(self) -> bool:
        """True while prediction runs."""
        return self.state.stage == RunningStage.PREDICTING

    @predicting.setter
    def predicting(self, value: bool) -> None:
        self._set_stage(RunningStage.PREDICTING, value)

    @property
    def sanity_checking(self) -> bool:
        """True while the few validation batches before training run."""
        return self.state.stage == RunningStage.SANITY_CHECKING

    @sanity_checking.setter
    def sanity_checking(self, value: bool) -> None:
        self._set_stage(RunningStage.SANITY_CHECKING, value)

    def _set_stage(self, stage: RunningStage, value: bool) -> None:
        if value:
            self.state.stage = stage
        elif self.state.stage == stage:
            self.state.stage = None

    @property
    def evaluating(self) -> bool:
        """True while validation or a test runs."""
        return self.state.stage is not None and self.state.stage.evaluating

    @property
    def interrupted(self) -> bool:
        """True if the last run failed or was interrupted."""
        return self.state.status == TrainerStatus.INTERRUPTED
