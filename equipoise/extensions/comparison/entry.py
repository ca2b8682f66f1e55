"""`equipoise compare` for the help and the shell; the command itself is imported when it runs."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.app.command import Command

__all__ = ["COMMAND"]


def _run(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    from equipoise.extensions.comparison.command import show_comparison

    show_comparison(arguments, folders)


COMMAND = Command(
    summary="run the module under each strategy: speed, memory by device",
    run=_run,
    flags=("--json", "--largest", "--output=", "--steps=", "--strategies=", "--timeout="),
    examples=(
        (
            "--strategies=dp,ddp --steps=5 --largest[=N] --timeout=SECONDS --output=FOLDER --json",
            "which ones; timed steps; look for the largest batch; the bound of each trial",
        ),
    ),
)
