"""`equipoise runs` for the help and the shell, and the page of a sweep; the rest is imported when it runs."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.app.command import Command

__all__ = ["COMMAND", "page_of_sweep"]


def _run(arguments: Sequence[str], folders: Sequence[Path]) -> None:
    from equipoise.extensions.runs.command import show_runs

    show_runs(arguments)


def page_of_sweep(folder: Path) -> Path | None:
    """Write `runs.html`, the jobs of a sweep side by side.

    Args:
        folder: The folder of the sweep.

    Returns:
        The page; None if there are fewer than two runs.

    Raises:
        OSError: If the page cannot be written.
    """
    from equipoise.extensions.runs.command import write_page_of_sweep

    return write_page_of_sweep(folder)


COMMAND = Command(
    summary="runs side by side: state, what differs, best and last values",
    run=_run,
    flags=("--html=", "--json", "--sort="),
    usage="[FOLDER ...] [flags]",
    reads_configuration=False,
    examples=(
        ("", "the runs below outputs and multirun, the oldest first"),
        ("FOLDER --sort=val_loss --html=runs.html", "the best first, and a page with their curves; --json prints all"),
    ),
)
