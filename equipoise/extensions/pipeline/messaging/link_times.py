"""Time that values need between two processes of a pipeline."""

from time import perf_counter

import torch

from equipoise.extensions.pipeline.messaging.commands import FORWARD
from equipoise.extensions.pipeline.messaging.messages import Messenger

__all__ = ["answer_link", "time_link"]

# Bytes of the values that are sent there and back.
_SMALL = 8
_LARGE = 1 << 20
# Number of round trips with each of them, of which the quickest counts.
_ROUNDS = 4


def time_link(messenger: Messenger, other: int, device: torch.device) -> float:
    """Return the seconds in which a byte passes to a process or back, from values that it returns.

    Args:
        messenger: Connection to the other process, in which `answer_link` runs.
        other: Its rank.
        device: Device of the values.
    """
    # Processes compute while a message is on its way, so only the time that grows with its size counts.
    small = _round_trip(messenger, other, _SMALL, device)
    large = _round_trip(messenger, other, _LARGE, device)
    seconds_both_ways = max(0.0, large - small)
    return seconds_both_ways / 2 / (_LARGE - _SMALL)


def _round_trip(messenger: Messenger, other: int, nbytes: int, device: torch.device) -> float:
    values = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    times = []
    for _ in range(_ROUNDS):
        begin = perf_counter()
        messenger.send(other, FORWARD, values)
        messenger.receive(other, FORWARD).to(device)
        times.append(perf_counter() - begin)
    return min(times)


def answer_link(messenger: Messenger, other: int, device: torch.device) -> None:
    """Return the values that a process sends while it runs `time_link`.

    Args:
        messenger: Connection to the other process.
        other: Its rank.
        device: Device of this process.
    """
    for _ in range(2 * _ROUNDS):
        messenger.send(other, FORWARD, messenger.receive(other, FORWARD).to(device))
    messenger.flush()
