"""Private names of Ray. Ray is not imported here."""

import sys
from typing import Any

__all__ = ["error_of_worker", "in_tune_session"]

# Ray loads this module in the process of each trial.
_TUNE = "ray.tune.trainable.trainable_fn_utils"


def in_tune_session() -> bool:
    """Return True in the process of a trial of Ray Tune.

    Public functions that tell a trial from another process print a warning in the other one.
    """
    module: Any = sys.modules.get(_TUNE)
    if module is None:
        return False
    return bool(module._in_tune_session())


def error_of_worker(failure: BaseException) -> BaseException:
    """Return the error that a function raised in a worker of Ray Train.

    Ray wraps it in an error whose message is the whole traceback. The wrapper has the error under a private name only.

    Args:
        failure: An entry of `WorkerGroupError.worker_failures`.
    """
    error: Any = getattr(failure, "_base_exc", failure)
    return error  # type: ignore[no-any-return]
