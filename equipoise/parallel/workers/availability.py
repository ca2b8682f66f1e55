"""The decision whether worker processes can be started: on POSIX they can, on Windows they cannot.

A server forks them, and signals and groups of processes end them; see `launch` and `bounded_call`. Code that starts
workers asks here before it starts anything.
"""

import platform
from multiprocessing import get_all_start_methods

from equipoise.errors import ConfigurationError

__all__ = ["IN_ONE_PROCESS", "can_start_workers", "require_workers"]

IN_ONE_PROCESS = "Take strategy='single_device', or 'dp' for several devices, which compute in one process"
"""The alternative to a strategy that starts processes."""


def can_start_workers() -> bool:
    """Return True if worker processes can be started here.

    Example:
        >>> can_start_workers() or platform.system() == "Windows"
        True
    """
    return "forkserver" in get_all_start_methods()


def require_workers(feature: str, alternative: str = "") -> None:
    """Check that worker processes can be started here.

    Args:
        feature: A feature that starts them, as the subject of the message.
        alternative: An alternative without them, as the beginning of a sentence. Default: none.

    Raises:
        ConfigurationError: If they cannot.

    Example:
        >>> require_workers("launcher=pool", "Leave the launcher out")
    """
    if can_start_workers():
        return
    remedy = "Run it under Linux or macOS, or in WSL 2 on Windows."
    if alternative:
        remedy = f"{alternative}, or run it under Linux or macOS, or in WSL 2 on Windows."
    raise ConfigurationError(
        f"{feature} needs a fork server, and POSIX signals between processes, but {platform.system()} has neither."
        f" {remedy}"
    )
