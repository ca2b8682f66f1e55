"""`equipoise tune` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="find what limits the run, and measure the remedies in short copies of it",
    run="equipoise.extensions.timing.tune.command:show_tuning",
    flags={
        "--seconds=": "how long it measures (60)",
        "--apply": "start the run afterwards, with what made it faster",
        "--json": "print the results as JSON",
    },
)
