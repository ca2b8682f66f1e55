"""Ports at which programs meet that are started a while later."""

import random
import socket

__all__ = ["unused_port"]

_RANGE = range(20_000, 30_000)  # below those that systems hand out, so that no other program is given it


def unused_port() -> int:
    """Return a port of this machine that no program uses.

    A socket bound to port 0 would be given one that the system hands out again as soon as the socket is closed.
    """
    for port in random.SystemRandom().sample(_RANGE, len(_RANGE)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"all ports from {_RANGE.start} to {_RANGE.stop - 1} are in use")
