"""`equipoise runs` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="runs side by side: state, what differs, best and last values",
    run="equipoise.extensions.runs.command:show_runs",
    flags=("--html=", "--json", "--sort="),
    usage="[FOLDER ...] [flags]",
    reads_configuration=False,
    examples=(
        ("", "the runs below outputs and multirun, the oldest first"),
        ("FOLDER --sort=val_loss --html=runs.html", "the best first, and a page with their curves; --json prints all"),
    ),
)
