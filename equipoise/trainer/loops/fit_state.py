"""FitState: what outlives an epoch and a fit, in plain data."""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from equipoise.parallel.batches.weighting import AccumulationWindow
from equipoise.trainer.checkpointing.module.hyperparameters import UnplacedHyperparameters
from equipoise.trainer.checkpointing.module.switches import Switches
from equipoise.trainer.data.training_data import TrainingData
from equipoise.trainer.logging.collection import Collection
from equipoise.trainer.state.hook_state import HookState
from equipoise.trainer.state.progress import FitProgress
from equipoise.trainer.state.sent_state import LOCAL, RESULT, SentState

__all__ = ["FitState"]


@dataclass(eq=False)
class FitState(SentState):
    """State of training, with which a second `fit` or a resumed one continues.

    Attributes:
        run: Identity of the training, which its checkpoints contain; a run that is resumed keeps it.
        progress: All counters.
        data: The training loaders, and the order of the present epoch.
        collection: Logged values of the epoch.
        window: The accumulation window.
        val_check_batch: Number of batches from one validation to the next; infinite: validate at the epoch's end;
            None: validate by the clock.
        last_validation: Time of the last validation, or of the first batch, in seconds of a monotonic clock.
        before_validation: State that the present or last validation changes, as it was before.
        validated: Names of the values that the validation of an earlier process has logged.
        validated_metrics: Names of the module's metrics that it has logged.
        switches: Switches that the training has turned in the module beside its weights.
        skip_backward: Run the forward only (stochastic weight averaging sets this).
        waits_for_minimum: True once a message said that `min_epochs` or `min_steps` keep training from a stop.
        left: State with which a later run continues the epoch that a limit has cut short; None if the last epoch was
            complete.
        has_ended: True if `on_train_end` was called after the last batch.
        has_ended_early: True if the batches of the epoch ended before their promised number, which was noticed after
            the last one.
        has_validated_in_epoch: True if a validation has begun in the present epoch.
        hook_state: State that hooks have set in the objects of the present run; None before the first.
        unplaced: Hyperparameters that hold networks, as they were before the strategy changed layers; None if it does
            not.
        is_uneven: True during a step for which some processes may have no batch.
        awaits_step: True until replicas are compared after the first optimiser step of a run.
    """

    progress: FitProgress = field(metadata=RESULT)
    # Of the operating system: no generator of the training may change.
    run: str = field(default_factory=lambda: uuid.uuid4().hex, metadata=RESULT)
    data: TrainingData = field(default_factory=TrainingData)
    collection: Collection = field(default_factory=lambda: Collection(training=True), metadata=RESULT)
    window: AccumulationWindow = field(default_factory=AccumulationWindow)
    switches: Switches = field(default_factory=Switches, metadata=RESULT)
    skip_backward: bool = False

    # Validation.
    val_check_batch: float | None = None
    last_validation: float = field(default=0.0, metadata=RESULT)
    before_validation: dict[str, Any] = field(default_factory=dict)
    validated: frozenset[str] = frozenset()
    validated_metrics: frozenset[str] = frozenset()

    # The end.
    waits_for_minimum: bool = field(default=False, metadata=RESULT)
    left: dict[str, Any] | None = field(default=None, metadata=RESULT)
    has_ended: bool = field(default=False, metadata=RESULT)
    has_ended_early: bool = field(default=False, metadata=RESULT)
    has_validated_in_epoch: bool = field(default=False, metadata=RESULT)
    is_uneven: bool = False
    hook_state: HookState | None = field(default=None, metadata=LOCAL)
    unplaced: UnplacedHyperparameters | None = field(default=None, metadata=LOCAL)
    awaits_step: bool = False

    def batches_done(self) -> bool:
        """Return True if the epoch came to its last batch."""
        batch = self.progress.batch
        return batch.is_last_batch or batch.current.ready == self.data.end

    def begin(self) -> None:
        """Begin a training that does not end before its first batch."""
        self.has_ended = False
        self.awaits_step = False
        self.is_uneven = False

    def end(self) -> None:
        """Note that `on_train_end` is called."""
        self.has_ended = True

    def begin_run(self, hook_state: HookState) -> None:
        """Forget the switches and the loaders of earlier runs, and what their hooks have set.

        Args:
            hook_state: State that the hooks of this run will set.
        """
        self.switches = Switches()
        self.hook_state = hook_state
        self.unplaced = None
        self.data.forget()

    def note_wait(self) -> bool:
        """Note that a request to stop waits for `min_epochs` or `min_steps`. Return True the first time."""
        is_first = not self.waits_for_minimum
        self.waits_for_minimum = True
        return is_first

    def schedule_validation(self, val_check_batch: float | None) -> None:
        """Set the number of batches between validations, and start the clock."""
        self.val_check_batch = val_check_batch
        self.restart_clock()

    def restart_clock(self) -> None:
        """Note the time of a validation's end."""
        self.last_validation = time.monotonic()

    def load_position(self, position: dict[str, Any]) -> None:
        """Load what a checkpoint holds of this state, beside the counters and the data.

        Args:
            position: The position of the checkpoint; see `trainer/loops/position.py`.
        """
        assert self.hook_state is not None
        before_request = position.get("before_request", {})
        self.hook_state.resume(position.get("hook_state", {}), position.get("data_before_order", {}), before_request)
        self.window.load_state_dict(position["window"])
        self.progress.skipped_steps = position.get("skipped_steps", 0)
        self.has_ended = position.get("has_ended", False)
        self.has_ended_early = position.get("has_ended_early", False)
        self.has_validated_in_epoch = position.get("has_validated_in_epoch", False)
        self.validated = frozenset(position.get("validated", ()))
        self.validated_metrics = frozenset(position.get("metrics_of_validation", ()))

    def state_dict(self) -> dict[str, Any]:
        """Return the `fit_loop` entry of a checkpoint: counters, and the states of loaders that have one."""
        state = self.progress.state_dict()
        loader_states = self.data.loader_states()
        if loader_states:
            state["state_dict"] = {"combined_loader": loader_states}
        return state
