"""Private names of Ray. Ray is not imported here."""

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["error_of_trial", "error_of_worker", "in_tune_session"]

# Ray loads these modules in the process of each trial.
_TUNE = "ray.tune"
_SESSION = "ray.tune.trainable.trainable_fn_utils"


def in_tune_session() -> bool:
    """Return True in the process of a trial of Ray Tune.

    Public functions that tell a trial from another process print a warning in the other one.
    """
    is_in_session: Any = getattr(sys.modules.get(_SESSION), "_in_tune_session", None)
    if is_in_session is not None:
        return bool(is_in_session())
    context_of: Any = getattr(sys.modules.get(_TUNE), "get_context", None)
    if context_of is None:
        return False
    return _without_warnings(lambda: context_of().get_trial_id()) is not None


def _without_warnings(function: Callable[[], Any]) -> Any:
    """Return what a function of Ray returns, without what it prints."""
    logger = logging.getLogger("ray")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            return function()
        finally:
            logger.setLevel(level)


def error_of_trial(trial: Any) -> Any:
    """Return the error of a trial of Ray Tune; None if the trial shows it only in its result, at the end."""
    read = getattr(trial, "get_pickled_error", None)
    return None if read is None else read()


def error_of_worker(failure: BaseException) -> BaseException:
    """Return the error that a function raised in a worker of Ray Train.

    Ray wraps it in an error whose message is the whole traceback. The wrapper has the error under a private name only.

    Args:
        failure: An entry of `WorkerGroupError.worker_failures`.
    """
    error: Any = getattr(failure, "_base_exc", failure)
    return error  # type: ignore[no-any-return]
