"""A trial in a process of its own, which has a bound: started, awaited, and ended with all that it has started."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from equipoise.extensions.comparison.bounded.worker import REQUEST, RESULT, Trial, answer
from equipoise.parallel.workers.bounded_call import call_bounded
from equipoise.parallel.workers.preloading import preload

__all__ = ["run_in_process"]


def run_in_process(run: Trial, request: Mapping[str, Any], folder: Path, timeout: float) -> dict[str, Any]:
    """Run a trial and return its result.

    Args:
        run: The function of a module that runs the trial; see `worker.answer`.
        request: The trial, as `worker.answer` takes it.
        folder: A new folder for its files.
        timeout: Seconds after which the process is ended.

    Returns:
        The measurements, or under "reason" why there are none.
    """
    # 1. The request.
    folder.mkdir()
    text = json.dumps(request, default=str)
    (folder / REQUEST).write_text(text, encoding="utf-8")

    # 2. The process. All trials of a command share one server, which imports the module of the function.
    preload(run.__module__)
    output = folder / "output.txt"
    reason = call_bounded(answer, folder, run, timeout=timeout, output=output, option=" (--timeout=SECONDS)")

    # 3. The result.
    result_file = folder / RESULT
    if result_file.is_file():
        text = result_file.read_text(encoding="utf-8")
        result: dict[str, Any] = json.loads(text)
        return result
    return {"reason": reason or "its process left no result"}
