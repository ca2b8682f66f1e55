"""Searches of the finders among the callbacks, in their order, before a run."""

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from equipoise.errors import ConfigurationError
from equipoise.extensions.tuning.batch_sizes import find_batch_size
from equipoise.extensions.tuning.evaluation_batch_sizes import find_evaluation_size
from equipoise.extensions.tuning.interop import ends_after_search, searches_learning_rate
from equipoise.extensions.tuning.learning_rates import find_learning_rate
from equipoise.extensions.tuning.trials.trial import MakeTrainer
from equipoise.interop.lightning.callbacks import is_stock_finder
from equipoise.notices import rank_zero_warn
from equipoise.trainer.runtime.request import Request

__all__ = ["tune"]


def tune(trainer: Any, make: MakeTrainer, request: Request) -> bool:
    """Let each finder among the callbacks search before a run: one of a learning rate before a fit alone.

    Returns:
        True if the run shall follow; False if a method of Lightning's Tuner wanted the search alone.

    Raises:
        ConfigurationError: If a search is not possible.
    """
    run_follows = True
    for finder in list(trainer.callbacks):
        if not is_stock_finder(finder):
            continue
        name = type(finder).__name__
        if not request.fitting and searches_learning_rate(finder):
            # A finder of a trainer that fits and then tests.
            if ends_after_search(finder):
                raise ConfigurationError(f"{name} searches for a fit, not for `{request.fn.value}`. Use method='fit'.")
            continue
        run_follows = run_follows and not ends_after_search(finder)
        if trainer.fast_dev_run:
            rank_zero_warn(f"fast_dev_run: {name} does not search.")
        elif not request.fitting:
            find_evaluation_size(trainer, make, request, finder)
        elif request.ckpt_path is not None:
            rank_zero_info(f"The fit resumes from a checkpoint, so {name} does not search.")
        elif searches_learning_rate(finder):
            find_learning_rate(trainer, make, request, finder)
        else:
            find_batch_size(trainer, make, request, finder)
    return run_follows
