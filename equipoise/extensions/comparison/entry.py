"""`equipoise compare` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="run the module under each strategy: speed, memory by device",
    run="equipoise.extensions.comparison.command:show_comparison",
    flags=("--json", "--largest", "--output=", "--steps=", "--strategies=", "--timeout="),
    examples=(
        (
            "--strategies=dp,ddp --steps=5 --largest[=N] --timeout=SECONDS --output=FOLDER --json",
            "which ones; timed steps; look for the largest batch; the bound of each trial",
        ),
    ),
)
