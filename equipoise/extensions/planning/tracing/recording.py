"""A step recorded by the ledger that also records real steps: the second one, when the optimiser has its state."""

import gc
from collections.abc import Iterator
from typing import Any

from equipoise.extensions.planning.peaks.recorded_step import Holder, PhaseStart, RecordedStep
from equipoise.extensions.planning.tracing.batches import batch_of_size
from equipoise.extensions.planning.tracing.stand_in import ignore
from equipoise.extensions.planning.tracing.step import PlannedStep
from equipoise.memory.profile.ledger import Ledger
from equipoise.memory.records import TensorRecord

__all__ = ["record_step"]

# A window of more batches repeats its second one.
_MOST_BATCHES = 2


def record_step(step: PlannedStep, example: Any, batch_size: int, accumulate_grad_batches: int = 1) -> RecordedStep:
    """Return the record of a step with a batch size.

    Args:
        step: The step. It is run twice unless its optimisers have a state already.
        example: A batch of any size.
        batch_size: The samples of each batch of the recorded step.
        accumulate_grad_batches: Batches of a window. Default: 1.
    """
    ledger = Ledger(step.module, step.optimizers)
    starts: list[PhaseStart] = []

    def begin(phase: str) -> None:
        ledger.begin(phase)
        starts.append(PhaseStart(phase, ledger.num_events))

    # 1. The first step, in which the optimisers create their state.
    if not any(optimizer.state for optimizer in step.optimizers):
        step.run(_batches(step, None, example, batch_size, 1), 1, ignore)

    # 2. The recorded step. Garbage is collected before it, so that it has the same events at every batch size.
    count = min(_MOST_BATCHES, accumulate_grad_batches)
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    ledger.start()
    try:
        step.run(_batches(step, ledger, example, batch_size, count), count, begin)
    finally:
        ledger.stop()
        if was_enabled:
            gc.enable()

    # 3. Its record. What exists before the first phase belongs to it.
    records, events = ledger.history("cpu")
    first, *others = starts
    return RecordedStep(
        batch_size=batch_size,
        holders=[_holder(record, step.weight_copies) for record in records],
        # The sign tells a release.
        events=[event.holder + 1 if event.is_allocation else -(event.holder + 1) for event in events],
        phases=[PhaseStart(first.phase, 0), *others],
    )


def _batches(
    step: PlannedStep,
    ledger: Ledger | None,
    example: Any,
    batch_size: int,
    count: int,
) -> Iterator[Any]:
    """Yield the batches of a window, each created when the step takes it."""
    for _ in range(count):
        batch = step.convert(batch_of_size(example, batch_size))
        if ledger is not None:
            ledger.add_batch(batch)
        yield batch
        del batch


def _holder(record: TensorRecord, copies: int) -> Holder:
    """Return a storage with the copies that callbacks keep of it, which lie where the storage lies."""
    nbytes = record.nbytes
    if record.category in ("parameter", "buffer"):
        nbytes *= 1 + copies
    return Holder(record.category, record.module, nbytes)
