"""`Trainer(verify=N)`: the first steps of a fit under its strategy, and on one device, from one state, and compared."""

import warnings
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError, StepError
from equipoise.extensions.tuning.trials.trial import MakeTrainer, copy_of, generators_kept, quiet, trainer_like
from equipoise.extensions.verification.findings import LOGGED, Finding, compare
from equipoise.extensions.verification.recording import Recorder
from equipoise.extensions.verification.reference import Follower, RecordedLoader, recorded_loader
from equipoise.extensions.verification.remedies import remedy_for
from equipoise.notices import rank_zero_warn
from equipoise.parallel.equality import EXACT, Tolerance, tolerance_of
from equipoise.strategies.strategy import Strategy
from equipoise.trainer.runtime.request import Request

__all__ = ["Verification", "verify", "verify_before_fit"]

_NAME = "Trainer(verify=...)"
# Ways to compute a step, which one device does without.
_WAYS = {
    "compile": False,
    "capture": False,
    "fused_optimizer": False,
    "step_in_backward": False,
    "offload_activations": False,
    "activation_checkpointing": None,
    "sync_batchnorm": False,
    "limit_train_batches": None,
    "overfit_batches": 0.0,
    "reload_dataloaders_every_n_epochs": 0,
}


@dataclass
class Verification:
    """Result of a verification.

    Attributes:
        steps: Number of optimiser steps that were compared.
        findings: The compared values, in their order.
        to_the_bit: Whether one device was to compute the same bits.
        draws: Whether the two agree only where all samples draw the same numbers, without batch statistics.
        reason: The reason why nothing was compared; None if it was.
        remedy: What to do about the first difference.
    """

    steps: int = 0
    findings: list[Finding] = field(default_factory=list)
    to_the_bit: bool = False
    draws: bool = False
    reason: str | None = None
    remedy: str = ""

    @property
    def difference(self) -> Finding | None:
        """The first difference; None if there is none. Values that one process logs may differ."""
        return next((finding for finding in self.findings if finding.gap and finding.kind != LOGGED), None)

    @property
    def sentence(self) -> str:
        """The result in a sentence."""
        if self.reason is not None:
            return f"Not compared with one device: {self.reason}"
        if self.difference is not None:
            return f"The steps are not those of one device: {self.difference}. {self.remedy}"
        if self.draws:
            return (
                f"The first {self.steps} optimiser steps are those of one device, but for random numbers and batch"
                " statistics: they agree if all samples draw the same numbers and BatchNorm uses running statistics."
            )
        how = "within rounding"
        if self.to_the_bit:
            how = "to the bit"
        return f"The first {self.steps} optimiser steps are those of one device, {how}."


def verify_before_fit(trainer: Any, make: MakeTrainer, request: Request) -> bool:
    """Verify a fit before it begins; a door of the trainer.

    Returns:
        True: the fit follows.

    Raises:
        StepError: If its steps are not those of one device.
    """
    steps = trainer.constructor_arguments.get("verify", 0)
    if not request.fitting or not steps:
        return True
    result = verify(trainer, make, request, steps)
    if result.difference is not None:
        raise StepError(f"{result.sentence} verify=0 trains without this comparison.")
    if result.reason is None:
        rank_zero_info(result.sentence)
    else:
        rank_zero_warn(result.sentence)
    return True


def verify(trainer: Any, make: MakeTrainer, request: Request, steps: int) -> Verification:
    """Compute the first steps of a fit as the trainer would, and on one device, and compare them.

    Nothing of it stays: both train copies of the module, without the user's callbacks and loggers, and all random
    generators are restored.

    Args:
        trainer: The user's trainer.
        make: Makes a trainer from its arguments.
        request: The fit.
        steps: Number of optimiser steps.
    """
    # 1. What no comparison could tell.
    strategy = trainer.connected_strategy
    try:
        alone = strategy.on_one_device()
    except ConfigurationError as error:
        return Verification(reason=str(error))
    if strategy.processes.world_size > 1 and not strategy.processes.spawns:
        return Verification(reason="a launcher has started the processes. Start one, whose strategy starts the others.")
    if isinstance(request.loaders.get("train"), Iterator):
        return Verification(reason="the training batches are those of an iterator, which can be read once.")

    # 2. The comparison, and a second one that leaves random numbers out.
    trials = _Trials(trainer, make, request, steps, alone)
    result = trials.result(alike=False)
    if result.difference is None or result.to_the_bit:
        return result
    try:
        second = trials.result(alike=True)
    except Exception as error:
        # The first difference says more than an error of the second check.
        second = Verification(reason=f"{type(error).__name__}: {error}")
    if second.reason is not None:
        result.remedy += f" Whether random numbers are the cause cannot be told: {second.reason}"
        return result
    return replace(second, draws=True)


class _Trials:
    """The runs of a verification.

    Args:
        trainer: The user's trainer; see `verify` for it and those that follow.
        alone: A strategy that computes the same bits on one device; None: whole batches are compared.
    """

    def __init__(self, trainer: Any, make: MakeTrainer, request: Request, steps: int, alone: Strategy | None) -> None:
        self._trainer = trainer
        self._make = make
        self._request = request
        self._steps = steps
        self._alone = alone
        arguments = trainer.constructor_arguments
        # Those on which learning rates may depend; `Recorder` ends the runs.
        limits = {name: arguments.get(name) for name in ("max_epochs", "max_steps")}
        self._limits = {name: limit for name, limit in limits.items() if limit is not None}

    def result(self, *, alike: bool) -> Verification:
        """Return the comparison of both."""
        # 1. The user's run, with what makes its steps cheaper.
        savers = [
            deepcopy(callback) for callback in self._trainer.callbacks if getattr(callback, "saves_memory", False)
        ]
        recorder = Recorder(self._steps, alike=alike)
        self._run(callbacks=[*savers, recorder])
        if not recorder.steps:
            return Verification(reason="no optimiser was stepped.")

        # 2. One device: the same bits, or whole batches.
        is_exact = self._alone is not None
        tolerance = EXACT
        if not is_exact:
            tolerance = self._tolerance(recorder)
        try:
            reference = self._on_one_device(recorder, tolerance, alike=alike)
        except Exception as error:
            # It may have too little memory, or batches of processes cannot be put together.
            first_line = str(error).partition("\n")[0]
            return Verification(reason=f"there the steps fail ({type(error).__name__}: {first_line}).")

        # 3. What differs. A remedy depends on what the trainer has turned on.
        findings = compare(reference, recorder, tolerance)
        result = Verification(len(recorder.steps), findings, to_the_bit=is_exact)
        difference = result.difference
        if difference is None:
            return result
        return replace(result, remedy=remedy_for(difference, self._trainer, to_the_bit=is_exact))

    def _on_one_device(self, recorder: Recorder, tolerance: Tolerance, *, alike: bool) -> Recorder:
        """Compute the recorded steps on one device, without a second warning of what the user has seen."""
        options: dict[str, Any] = {
            "devices": [str(self._trainer.connected_strategy.root_device)],
            "num_nodes": None,
            "strategy": self._alone or "single_device",
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._alone is not None:
                reference = Recorder(self._steps, alike=alike)
                self._run(**options, callbacks=[reference])
                return reference
            follower = Follower(recorder, tolerance, alike=alike)
            self._run(recorded_loader(recorder), **_WAYS, **options, callbacks=[follower])
            return follower

    def _tolerance(self, recorder: Recorder) -> Tolerance:
        """Return the rounding of the dtypes in which the run computes."""
        dtypes = {value.dtype for value in recorder.initial.values() if value.is_floating_point()}
        autocast = self._trainer.precision_in_use.autocast
        if autocast is not None:
            dtypes.add(autocast[1])
        return tolerance_of(dtypes)

    def _run(self, recorded: RecordedLoader | None = None, **changed: Any) -> None:
        """Train a copy of the module as the user's trainer would.

        Args:
            recorded: Batches in the place of the user's; hooks that prepare them have run.
            changed: Arguments of the Trainer.
        """
        request = self._request
        module = copy_of(request.module, _NAME)
        train = request.loaders.get("train")
        datamodule = request.datamodule
        with generators_kept(train), quiet():
            if recorded is not None:
                train = recorded
                vars(module).update(_PREPARED)
            if recorded is not None and datamodule is not None:
                # Its other methods may be called by the module.
                datamodule = copy(datamodule)
                train = None
                vars(datamodule).update(_PREPARED, train_dataloader=lambda: recorded)
            trial = trainer_like(self._trainer, self._make, **{"verify": 0, **self._limits, **changed})
            trial.fit(module, train, datamodule=datamodule)


def _same_batch(batch: Any, dataloader_idx: int) -> Any:
    return batch


# Hooks of batches that have gone through them.
_PREPARED = {"on_before_batch_transfer": _same_batch, "on_after_batch_transfer": _same_batch}
