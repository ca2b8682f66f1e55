"""`equipoise tune` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="find what limits the run, and measure the remedies in short copies of it",
    run="equipoise.extensions.timing.tune.command:show_tuning",
    flags=("--apply", "--json", "--seconds="),
    examples=(
        (
            "--seconds=60 --json --apply",
            "how long it measures; with --apply the run follows, with what made it faster",
        ),
    ),
)
