"""Files as runs leave them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["CONFIGURATION", "WriteRun", "content"]

ORIGIN = {
    "command": "equipoise fit",
    "folder": "/work",
    "versions": {"python": "3.12.1", "torch": "2.13.0"},
    "commit": "a" * 40,
    "changed": False,
    "host": "elsewhere",
    "process": 1,
    "process_began": 0.0,
}
CONFIGURATION = """\
stage: fit
output_dir: {folder}
module:
  _target_: Net
  lr: {lr}
  sizes: [8, 4]
logger:
  csv:
    save_dir: {folder}/logs
"""


def content(**given: Any) -> dict[str, Any]:
    """Return the content of a run.json."""
    return {
        "module": "Net",
        "state": "finished",
        "error": "",
        "began": "2026-01-01T10:00:00+00:00",
        "seen": "2026-01-01T10:01:00+00:00",
        "seconds": 60.0,
        "epochs": 2,
        "steps": 20,
        "peak_memory": {"cpu": 2**30},
        "monitored": {"val_accuracy": "max"},
        "curves": {"val_loss": [[9, 19], [0.5, 0.25]], "val_accuracy": [[9, 19], [0.9, 0.8]]},
        "times": [[0.0, 10.0, 20.0], [0.0, 20.0, 60.0]],
        **ORIGIN,
        **given,
    }


WriteRun = Callable[..., Path]
