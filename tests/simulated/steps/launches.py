"""Operations that the steps of a fit launch."""

from collections import Counter
from typing import Any

import lightning as L

from tests.simulated.devices.installation import extension

__all__ = ["FIRST_STEPS", "Launches", "Operations", "taken"]


# Steps in which a module is replicated or cut, an optimiser makes its state, and sums of logged values begin.
FIRST_STEPS = 2


# Operations of one step, by device.
Operations = tuple[Counter[str], ...]


class Launches(L.Callback):
    """Notes the operations from the end of one batch to that of the next."""

    def __init__(self) -> None:
        self.of_steps: list[Operations] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        extension().record_launches(True)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.of_steps.append(taken())


def taken() -> Operations:
    """Return the operations that each device has launched since the last call."""
    counts: Operations = tuple(Counter() for _ in range(extension().device_count()))
    for index, name in extension().take_launches():
        counts[index][name] += 1
    return counts
