"""`equipoise runs` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="runs side by side: state, what differs, best and last values",
    run="equipoise.extensions.runs.command:show_runs",
    flags={
        "--sort=": "the value to sort by, the best first",
        "--html=": "a file for a page with their curves",
        "--json": "print everything as JSON",
    },
    usage="[FOLDER ...] [flags]",
    reads_configuration=False,
    examples=(
        ("", "the runs below outputs and multirun, the oldest first"),
        ("FOLDER --sort=val_loss --html=runs.html", "the best first, and a page with their curves; --json prints all"),
    ),
)
