"""`equipoise plan` for the help and the shell."""

from equipoise.app.command import Command

__all__ = ["COMMAND"]

COMMAND = Command(
    summary="predict memory under each strategy: what fits, the largest batch",
    run="equipoise.extensions.planning.command.command:show_plan",
    flags={
        "--html=": "a file for a page with the plan",
        "--json": "print the plan as JSON",
        "--timeout=": "seconds after which the plan is given up",
    },
    examples=(("trainer.devices=2x24GiB", "plan for devices that are not here"),),
)
