"""Arguments of a trainer whose steps are a trial."""

from typing import Any

__all__ = ["ONLY_STEPS", "UNBOUNDED"]

# Steps that nothing ends and nothing comes before, without a profile or a summary.
UNBOUNDED: dict[str, Any] = {
    "max_epochs": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "num_sanity_val_steps": 0,
    "fast_dev_run": False,
    "barebones": False,
    "profiler": None,
    "enable_model_summary": False,
}

# Steps and nothing else: no evaluation, no files, no display.
ONLY_STEPS = {
    **UNBOUNDED,
    "limit_val_batches": 0,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
}
