"""The time in which values pass between two real processes is measured."""

import torch

from equipoise.extensions.pipeline.messaging.link_times import answer_link, time_link
from equipoise.extensions.pipeline.messaging.messages import Messenger
from tests.parallel.communication.test_process_group import in_group

CPU = torch.device("cpu")


def times_and_answers(rank: int) -> tuple[float, int]:
    """Time the way from the second process to the first, and then send an ordinary value over it."""
    messenger = Messenger(60.0)
    seconds = 0.0
    if rank:
        seconds = time_link(messenger, 0, CPU)
        messenger.send(0, 2, 7)
        messenger.flush()
        return seconds, 7
    answer_link(messenger, 1, CPU)
    return seconds, messenger.receive(1, 2)


def test_a_link_is_timed() -> None:
    (_, received), (seconds, sent) = in_group(times_and_answers)
    assert 0 <= seconds < 1
    assert received == sent
