"""`equipoise curves-equal` for the help and the shell; the command itself is imported when it runs."""

from collections.abc import Sequence
from pathlib import Path

from equipoise.app.command import Command

__all__ = ["COMMAND"]


def _run(arguments: Sequence[str], folders: Sequence[Path]) -> int:
    from equipoise.extensions.equality.command import run_curves_equal

    return run_curves_equal(arguments, folders)


COMMAND = Command(
    summary="where two runs differ first: logged values, weights",
    run=_run,
    flags=("--atol=", "--json", "--rtol="),
    usage="RUN_A RUN_B [flags]",
    reads_configuration=False,
    examples=(("outputs/a outputs/b --atol=1e-8 --rtol=1e-5 --json", "folders, checkpoints or metrics.csv"),),
)
