"""`equipoise tune` for the help and the shell; the command itself is imported when it runs."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.app.command import Command

__all__ = ["COMMAND"]


def _run(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    from equipoise.extensions.timing.tune.command import show_tuning

    show_tuning(arguments, folders)


COMMAND = Command(
    summary="find what limits the run, and measure the remedies in short copies of it",
    run=_run,
    flags=("--apply", "--json", "--seconds="),
    examples=(
        (
            "--seconds=60 --json --apply",
            "how long it measures; with --apply the run follows, with what made it faster",
        ),
    ),
)
