"""Limits of a run: epochs, steps, time, and batches of each loader."""

import math
from dataclasses import dataclass
from typing import Any

from equipoise.errors import ConfigurationError
from equipoise.notices import rank_zero_warn
from equipoise.trainer.settings import arguments as check
from equipoise.trainer.settings.arguments import Duration

__all__ = ["Limits"]


@dataclass
class Limits:
    """The limits of a trainer's runs, checked, under the names of its arguments.

    Attributes:
        val_check_seconds: Seconds between validations, where `val_check_interval` is a duration.
        num_sanity_val_steps: Number of batches of each loader; infinite for all.
    """

    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    limit_train_batches: int | float = 1.0
    limit_val_batches: int | float = 1.0
    limit_test_batches: int | float = 1.0
    limit_predict_batches: int | float = 1.0
    overfit_batches: int | float = 0.0
    val_check_interval: int | float = 1.0
    val_check_seconds: float | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | float = 2
    fast_dev_run: int | bool = False

    def limit_training(
        self, max_epochs: int | None, min_epochs: int | None, max_steps: int, min_steps: int | None
    ) -> None:
        """Set the limits of training; see the Trainer's arguments of these names."""
        self.max_epochs = check.check_count("max_epochs", max_epochs, least=0, optional=True, unlimited=True)
        self.min_epochs = check.check_count("min_epochs", min_epochs, least=0, optional=True)
        self.max_steps = check.check_count("max_steps", max_steps, least=0, unlimited=True)
        self.min_steps = check.check_count("min_steps", min_steps, least=0, optional=True)
        check.check_order(self.min_epochs, self.max_epochs, "epochs")
        check.check_order(self.min_steps, self.max_steps, "steps")

    def set_default_epochs(self, *, has_timer: bool) -> None:
        """Set the defaults of `max_epochs` and `min_epochs`, which depend on other limits, when a fit begins.

        Args:
            has_timer: Whether a Timer is among the callbacks, which limits the time.
        """
        if self.max_epochs is None:
            if self.max_steps != -1 or has_timer:
                self.max_epochs = -1
            else:
                rank_zero_warn(
                    "`max_epochs` was not set: training ends after 1000 epochs. For training without limit, set"
                    " max_epochs=-1."
                )
                self.max_epochs = 1000
        if self.min_epochs is None:
            self.min_epochs = 0 if self.min_steps is None else 1

    def limit_batches(
        self,
        train: int | float | None,
        val: int | float | None,
        test: int | float | None,
        predict: int | float | None,
        overfit: int | float,
    ) -> None:
        """Set the number of batches of an epoch, or the fraction of it, that each run stage reads."""
        self.limit_train_batches = check.check_batch_limit("limit_train_batches", train)
        self.limit_val_batches = check.check_batch_limit("limit_val_batches", val)
        self.limit_test_batches = check.check_batch_limit("limit_test_batches", test)
        self.limit_predict_batches = check.check_batch_limit("limit_predict_batches", predict)
        self.overfit_batches = check.check_batch_limit("overfit_batches", overfit)
        # Overfitting trains and validates on the same batches.
        if self.overfit_batches > 0:
            self.limit_train_batches = self.overfit_batches
            self.limit_val_batches = self.overfit_batches

    def limit_validation(
        self, interval: int | float | Duration | None, every_n_epoch: int | None, sanity_steps: Any
    ) -> None:
        """Set the interval of validations during a fit, and the batches of the sanity check."""
        self.val_check_interval, self.val_check_seconds = check.check_val_intervals(interval, every_n_epoch)
        self.check_val_every_n_epoch = every_n_epoch
        steps = check.check_count("num_sanity_val_steps", sanity_steps, least=0, unlimited=True)
        # -1 means all batches.
        if steps == -1:
            steps = math.inf
        self.num_sanity_val_steps = steps

    def limit_for_development(self, fast_dev_run: int | bool) -> None:
        """Apply `fast_dev_run`, which overrides the other limits."""
        # True and False are integers, too.
        if not isinstance(fast_dev_run, int) or fast_dev_run < 0:
            raise ConfigurationError(
                f"fast_dev_run must be True, False, or an integer of at least 0, not {fast_dev_run!r}."
            )
        self.fast_dev_run = fast_dev_run
        batches = int(fast_dev_run)
        if batches == 0:
            return
        if batches == 1:
            # 1 means the same as True, as in Lightning.
            self.fast_dev_run = True

        # Overfitting keeps its own number of batches.
        if not self.overfit_batches:
            self.limit_train_batches = batches
            self.limit_val_batches = batches
        self.limit_test_batches = batches
        self.limit_predict_batches = batches
        self.max_steps = batches
        self.max_epochs = 1

        # Validate once, at the end of the epoch.
        self.num_sanity_val_steps = 0
        self.val_check_interval = 1.0
        self.val_check_seconds = None
        self.check_val_every_n_epoch = 1

    def batches_between_validations(self, max_batches: float, *, has_length: bool) -> float | None:
        """Return the number of training batches from one validation to the next.

        Args:
            max_batches: Number of batches in an epoch; infinite if unknown.
            has_length: Whether all training loaders have a length.

        Returns:
            The number. Infinite: validate at the end of the epoch. None: validate by the clock.

        Raises:
            ConfigurationError: If the interval does not fit the loaders.
        """
        if self.val_check_seconds is not None:
            return None
        interval = self.val_check_interval

        # 1. A number of batches.
        if isinstance(interval, int):
            within_epoch = self.check_val_every_n_epoch is not None
            validates = self.limit_val_batches > 0
            if within_epoch and validates and interval > max_batches:
                raise ConfigurationError(
                    f"val_check_interval={interval} must be at most the number of training batches, {max_batches}."
                    " Count over epochs with check_val_every_n_epoch=None, or turn validation off with"
                    " limit_val_batches=0."
                )
            return interval

        # 2. A fraction of the epoch.
        if not has_length:
            if interval == 1.0:
                return math.inf
            raise ConfigurationError(
                f"val_check_interval={interval} is a fraction, but the training loader has no length. Give a number"
                " of batches, 1.0 or a time."
            )
        return max(1, int(max_batches * interval))
