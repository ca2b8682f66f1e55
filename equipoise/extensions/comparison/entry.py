"""`equipoise compare` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="run the module under each strategy: speed, memory by device",
    run="equipoise.extensions.comparison.command:show_comparison",
    flags={
        "--strategies=": "which strategies, separated by commas",
        "--steps=": "number of timed steps",
        "--largest": "search for the largest batch that fits",
        "--largest=": "the same, of at most so many samples",
        "--timeout=": "seconds that each trial may take",
        "--output=": "the folder of the page and the results",
        "--json": "print the results as JSON",
    },
    examples=(("--strategies=dp,ddp --steps=20", "two strategies, with twenty timed steps each"),),
)
