"""`equipoise plan` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="predict memory under each strategy: what fits, the largest batch",
    run="equipoise.extensions.planning.command.command:show_plan",
    flags=("--html=", "--json", "--timeout="),
    examples=(("trainer.devices=2x24GiB", "devices that are not here; --json, --html=FILE, --timeout=SECONDS"),),
)
