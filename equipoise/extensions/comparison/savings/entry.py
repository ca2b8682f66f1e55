"""`equipoise savings` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="measure a step of the module under each memory saver: peak, time",
    run="equipoise.extensions.comparison.savings.command:show_savings",
    flags={
        "--json": "print the table as JSON",
        "--timeout=": "seconds that each measurement may take (600)",
    },
)
