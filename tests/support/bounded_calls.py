"""`call_bounded` in the process of a test: the same arguments, results and errors, without the time of a process."""

import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from equipoise.errors import ConfigurationError, in_one_line
from equipoise.parallel.workers.bounded_call import CallError

__all__ = ["call_here"]


def call_here(
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float,
    paths: Sequence[str] = (),
    option: str = "",
    explain: Callable[[Exception], str] = in_one_line,
    progress: str = "",
) -> Any:
    """Call a function as `call_bounded` does, with copies of its arguments."""
    function, arguments, explain = pickle.loads(pickle.dumps((function, arguments, explain)))
    before = list(sys.path)
    sys.path[:0] = paths
    try:
        return pickle.loads(pickle.dumps(function(*arguments)))
    except Exception as error:
        is_wrong_input = isinstance(error, ConfigurationError)
        raise CallError(explain(error), is_raised=True, is_wrong_input=is_wrong_input) from error
    finally:
        sys.path[:] = before
