"""The search for the largest batch size before a validation, a test or a prediction, by real steps.

An evaluation keeps no activations, so its memory is not that of a training step, which is predicted. The size is
doubled until the data end or the memory does, as in Lightning.
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.extensions.tuning.batch_sizes import FINDER, check_processes, check_settings
from equipoise.extensions.tuning.interop import (
    BatchSizeSettings,
    batch_size_settings,
    ends_after_search,
    keep_batch_size,
)
from equipoise.extensions.tuning.trials.batch_size_attribute import BatchSizeAttribute
from equipoise.extensions.tuning.trials.trial import MakeTrainer, copy_of, run_trial
from equipoise.interop.lightning.loaders import combine
from equipoise.memory.out_of_memory import is_out_of_memory
from equipoise.trainer.runtime.request import Request

__all__ = ["find_evaluation_size"]


class _Samples(Callback):
    """Counts the samples of the loaders of an evaluation.

    Attributes:
        most: Number of samples of the longest loader; None if unknown.
    """

    def __init__(self) -> None:
        self.most: int | None = None

    def _count(self, loaders: Any) -> None:
        combined, _ = combine(loaders, "sequential")
        samplers = [getattr(loader, "sampler", None) for loader in combined.flattened]
        if all(hasattr(sampler, "__len__") for sampler in samplers):
            self.most = max(map(len, samplers), default=0)  # type: ignore[arg-type]

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Count those of a validation."""
        self._count(trainer.val_dataloaders)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Count those of a test."""
        self._count(trainer.test_dataloaders)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Count those of a prediction."""
        self._count(trainer.predict_dataloaders)


def find_evaluation_size(trainer: Any, make: MakeTrainer, request: Request, finder: Any) -> None:
    """Search the largest batch size of an evaluation, give it to the module or data module, and keep it in the finder.

    Raises:
        ConfigurationError: If a setting is impossible, if there is no attribute for the size, if loaders were passed to
            a search that the Tuner asks for, or if no size fits.
    """
    # 1. Everything that can be wrong without a step.
    settings = batch_size_settings(finder)
    check_settings(settings)
    check_processes(trainer)
    entry_point = request.fn.value
    if any(loaders is not None for loaders in request.loaders.values()):
        reason = f"loaders were passed to `{entry_point}`, whose batch size is fixed"
        # The finder may be there for the fit.
        if ends_after_search(finder):
            raise ConfigurationError(f"{FINDER} cannot search: {reason}. Let the module or data module make them.")
        rank_zero_info(f"{FINDER} does not search, since {reason}.")
        return
    attribute = BatchSizeAttribute(settings.attribute, request.module, request.datamodule)

    # 2. Real steps with ever larger sizes.
    samples = _Samples()

    def fits(size: int) -> bool:
        module = copy_of(request.module, FINDER)
        try:
            with attribute.set_for_trial(module, size):
                run_trial(trainer, make, request, module, steps=settings.steps, callbacks=[samples])
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True

    rank_zero_info(f"Searching the largest batch size of `{entry_point}` that fits ...")
    size = _largest(settings, samples, fits)
    attribute.set(request.module, size)
    keep_batch_size(finder, size)
    rank_zero_info(f"Batch size set to {size}. {settings.steps} real steps of `{entry_point}` ran with it.")


def _largest(settings: BatchSizeSettings, samples: _Samples, fits: Callable[[int], bool]) -> int:
    """Return the largest size that fits, reduced by the margin if a larger one has failed.

    Raises:
        ConfigurationError: If none does.
    """
    largest = 0
    failed: int | None = None
    size: int | None = settings.first
    trials = 0
    while size is not None and trials < settings.most_trials:
        trials += 1
        if fits(size):
            largest = size
        else:
            failed = size
        size = _next(settings, samples.most, largest, failed)
    if largest == 0:
        raise ConfigurationError(
            f"{FINDER}: real steps ran out of memory with each of {trials} sizes, down to {failed}. Other programs may"
            " use the memory; set the batch size by hand."
        )
    if failed is None or settings.doubles:
        return largest
    return max(1, int(largest * (1 - settings.margin)))


def _next(settings: BatchSizeSettings, samples: int | None, largest: int, failed: int | None) -> int | None:
    """Return the size to try next; None at the end of the search.

    Args:
        settings: Arguments of the search.
        samples: Number of samples of a pass; None if unknown.
        largest: The largest size that fits so far; 0 if none does.
        failed: The smallest size that does not fit; None if all do.
    """
    # 1. Nothing has failed: double the size, until one batch holds all samples.
    if failed is None:
        if samples is not None and largest >= samples:
            return None
        doubled = 2 * largest
        if doubled <= settings.largest:
            return doubled
        if settings.doubles or largest == settings.largest:
            return None
        return settings.largest
    # 2. Something has failed: half of it if nothing fits yet, else between the two.
    if settings.doubles and largest > 0:
        return None
    middle = (largest + failed) // 2
    if middle > largest:
        return middle
    return None
