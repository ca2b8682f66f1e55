"""Arguments of a trainer that writes no files and shows nothing."""

from typing import Any

__all__ = ["QUIET"]

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
