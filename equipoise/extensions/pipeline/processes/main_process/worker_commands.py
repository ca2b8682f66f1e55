"""Commands to the workers of a pipeline, and their replies and errors."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from equipoise.extensions.pipeline.messaging.commands import COMMAND, REPLY, rank_of
from equipoise.extensions.pipeline.messaging.link_times import answer_link, time_link
from equipoise.extensions.pipeline.messaging.messages import Messenger, StageError

__all__ = ["WorkerCommands"]


class WorkerCommands:
    """Sends commands, receives replies, and records the first failure.

    A worker is named by its first stage. The last stage, and the number `last`, stand for the main process.

    Args:
        messenger: Connection to the workers.
        devices: The device of each process, in the order of their first stages; the last is the main process's.

    Attributes:
        messenger, devices: As above.
        last: Number of the first stage of the main process.
        failed: Device of the stage that failed first in the present step; None if none has.
    """

    def __init__(self, messenger: Messenger, devices: Sequence[torch.device]) -> None:
        self.messenger = messenger
        self.devices = list(devices)
        self.last = len(devices) - 1
        self.failed: torch.device | None = None

    # Commands.

    def send_command(
        self,
        stage: int,
        name: str,
        *arguments: Any,
    ) -> None:
        """Send a command to a worker, and wait for nothing.

        Args:
            stage: First stage of the worker.
            name: Name of the command; see `StageWorker`.
            *arguments: Arguments of the command.
        """
        self._send(stage, (name, *arguments), has_reply=False)

    def _send(self, stage: int, command: tuple[Any, ...], *, has_reply: bool) -> None:
        self.messenger.send(self._rank_of(stage), COMMAND, (has_reply, *command))

    def send_to_all(self, name: str, *arguments: Any) -> None:
        """Send a command to all workers, and wait for nothing."""
        for stage in range(self.last):
            self.send_command(stage, name, *arguments)

    def request(
        self,
        commands: Mapping[int, tuple[Any, ...]],
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, Any]:
        """Send commands to workers, and return their replies.

        Args:
            commands: For each stage the name of the command and its arguments.
            meanwhile: Part of this process in the commands, before it waits for replies. Default: it has none.

        Raises:
            BaseException: Error of a worker, in one of these commands or in an earlier one.
        """
        # 1. Send all commands before waiting for the first reply.
        for stage, command in commands.items():
            self._send(stage, command, has_reply=True)
        if meanwhile is not None:
            meanwhile()

        # 2. Receive all replies before an error is raised.
        results = {}
        first_failure = None
        for stage in commands:
            results[stage], failure = self.messenger.receive(self._rank_of(stage), REPLY)
            first_failure = first_failure or failure
        if first_failure is not None:
            raise self.as_error(first_failure)
        return results

    def request_all(self, *command: Any) -> list[Any]:
        """Send a command to all workers, and return their replies in the order of stages."""
        commands = dict.fromkeys(range(self.last), command)
        return list(self.request(commands).values())

    def time_links(self) -> list[float]:
        """Return the seconds in which a byte passes from each process to the next, and from this one to the first."""
        # 1. Each worker times the way to the next process.
        seconds = []
        device = self.devices[-1]
        for stage in range(self.last):
            rank = self._rank_of(stage)
            next_stage = stage + 1
            meanwhile = None
            if next_stage == self.last:
                meanwhile = partial(answer_link, self.messenger, rank, device)
            else:
                self.send_command(next_stage, "answer_link", rank)
            command = ("time_link", self._rank_of(next_stage))
            seconds.append(self.request({stage: command}, meanwhile)[stage])

        # 2. The main process times the way to the first stage.
        self.send_command(0, "answer_link", 0)
        seconds.append(time_link(self.messenger, self._rank_of(0), device))
        return seconds

    def _rank_of(self, stage: int) -> int:
        return rank_of(stage, len(self.devices))

    # Failures.

    def as_error(self, failure: StageError) -> BaseException:
        """Return the error that arrived in place of a value, and record its device."""
        self.note_failure(torch.device(failure.device))
        return failure.as_error()

    def note_failure(self, device: torch.device) -> None:
        """Record the device of a failed stage. The first failure counts."""
        if self.failed is None:
            self.failed = device
