"""`equipoise curves-equal` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="where two runs differ first: logged values, weights",
    run="equipoise.extensions.equality.command:run_curves_equal",
    flags={
        "--atol=": "the absolute difference that counts as equal (0)",
        "--rtol=": "the relative difference that counts as equal (0)",
        "--json": "print the differences as JSON",
    },
    usage="RUN_A RUN_B [flags]",
    reads_configuration=False,
    examples=(("outputs/a outputs/b --atol=1e-8 --rtol=1e-5", "folders, checkpoints or metrics.csv"),),
)
