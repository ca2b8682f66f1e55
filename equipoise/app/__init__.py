"""The `equipoise` command: Hydra composes a configuration, and its objects are built and run.

`equipoise.app.run` is for a `hydra.main` of one's own. Hydra is imported on the first use of a name.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from equipoise.app.command import Command as Command
    from equipoise.app.compose import complete, compose_values, explain_keys, main, run

__all__ = ["Command", "complete", "compose_values", "explain_keys", "main", "run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Command":
        # Commands are listed also where Hydra is not installed.
        from equipoise.app.command import Command

        return Command
    from equipoise.app import compose

    return getattr(compose, name)
