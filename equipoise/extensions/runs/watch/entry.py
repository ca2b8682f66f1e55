"""`equipoise watch` for the help and the shell; the rest is imported when it runs."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.app.command import Command

__all__ = ["COMMAND"]


def _run(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    from equipoise.extensions.runs.watch.command import watch

    watch(arguments)


COMMAND = Command(
    summary="a page in the browser with the values of runs while they train",
    run=_run,
    flags=("--port=",),
    usage="[FOLDER ...] [flags]",
    reads_configuration=False,
    examples=(
        ("", "the runs below outputs and multirun, on this machine alone; Ctrl-C ends it"),
        ("outputs/FOLDER --port=8300", "one run, on another port"),
    ),
)
