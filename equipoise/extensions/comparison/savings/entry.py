"""`equipoise savings` for the help and the shell; the command itself is imported when it runs."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.app.command import Command

__all__ = ["COMMAND"]


def _run(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    from equipoise.extensions.comparison.savings.command import show_savings

    show_savings(arguments, folders)


COMMAND = Command(
    summary="measure a step of the module under each memory saver: peak, time",
    run=_run,
    flags=("--json", "--timeout="),
    examples=(("--json", "the table as JSON; --timeout=SECONDS bounds each measurement (600)"),),
)
