"""`equipoise plan` for the help and the shell; the command itself is imported when it runs."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.app.command import Command

__all__ = ["COMMAND"]


def _run(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    # The help of all commands shall not load the planner.
    from equipoise.extensions.planning.command.command import show_plan

    show_plan(arguments, folders)


COMMAND = Command(
    summary="predict memory under each strategy: what fits, the largest batch",
    run=_run,
    flags=("--html=", "--json", "--timeout="),
    examples=(("trainer.devices=2x24GiB", "devices that are not here; --json, --html=FILE, --timeout=SECONDS"),),
)
