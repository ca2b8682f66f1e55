"""A section of the report: how often the processes have averaged, and what that has cost."""

from typing import Any

from equipoise.extensions.report import ReportSection


def section(trainer: Any, module: Any) -> ReportSection | None:
    """Return the section of a run under `local_sgd` in several processes; None for other runs."""
    counts = getattr(trainer.strategy, "counts", {})
    if getattr(trainer.strategy, "name", "") != "local_sgd" or not counts["rounds"]:
        return None
    steps, rounds, sent = counts.values()
    return ReportSection(
        "Local SGD",
        "What each process has sent. Under ddp it sends gradients as large as its parameters in each step.",
        table=[
            ("", "exchanges", "bytes"),
            ("local_sgd", f"{rounds:,}", f"{sent:,}"),
            ("ddp", f"{steps:,}", f"{sent // rounds * steps:,}"),
        ],
    )
