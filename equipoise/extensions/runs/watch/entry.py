"""`equipoise watch` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="a page in the browser with the values of runs while they train",
    run="equipoise.extensions.runs.watch.command:watch",
    flags={
        "--port=": "the port of the page",
    },
    usage="[FOLDER ...] [flags]",
    reads_configuration=False,
    examples=(
        ("", "the runs below outputs and multirun, on this machine alone; Ctrl-C ends it"),
        ("outputs/FOLDER --port=8300", "one run, on another port"),
    ),
)
