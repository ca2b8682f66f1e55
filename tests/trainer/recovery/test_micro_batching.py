"""Sizes of micro-batches that fit, and decisions of callbacks, asked directly."""

from typing import Any

import torch
from torch import Tensor

from equipoise import Callback
from equipoise.memory.out_of_memory import Split
from equipoise.parallel.step_protocols import StepResult
from equipoise.trainer.recovery.captured_error import CapturedError
from equipoise.trainer.recovery.micro_batching import MicroBatcher
from tests.support.networks.transparency import Mlp
from tests.support.run_parts import parts_of_fit
from tests.trainer.recovery.out_of_memory import Answers


def batcher(*callbacks: Callback) -> MicroBatcher:
    parts = parts_of_fit(Mlp(), callbacks=list(callbacks))
    return MicroBatcher(*parts, lambda parts, is_last: StepResult(None, None, None))


def batch(size: int, features: int = 3) -> tuple[Tensor]:
    return (torch.zeros(size, features),)


def count(helper: MicroBatcher, parts: Any) -> int:
    return helper.count(helper.measure(parts))


def event(helper: MicroBatcher, parts: Any, number: int, refusal: str = "") -> Any:
    captured = CapturedError("CUDA out of memory.", "")
    return helper.event(captured, "forward", 2, parts, number, refusal)


class TestSizes:
    def test_batches_of_the_same_kind_are_split_to_the_size_that_fits(self) -> None:
        helper = batcher()
        helper.note_failure(batch(8), Split(3))
        assert [count(helper, batch(size)) for size in (8, 3, 4, 10)] == [3, 1, 2, 4]

    def test_batches_of_another_kind_are_not(self) -> None:
        helper = batcher()
        helper.note_failure(batch(8), Split(3))
        assert count(helper, batch(8, features=4)) == 1

    def test_a_small_batch_does_not_show_that_the_larger_size_fits(self) -> None:
        helper = batcher()
        helper.note_failure(batch(8), Split(4, grow_after=1))
        helper.note_success(helper.measure(batch(8)))
        helper.note_success(helper.measure(batch(2)))
        helper.note_failure(batch(8), Split(8, grow_after=1))
        assert count(helper, batch(8)) == 4

    def test_what_was_learned_outlives_an_epoch(self) -> None:
        of_fit = parts_of_fit(Mlp())
        sizes: dict[Any, Any] = {}
        epochs = [MicroBatcher(*of_fit, lambda parts, is_last: StepResult(None, None, None), sizes) for _ in range(2)]
        epochs[0].note_failure(batch(8), Split(2))
        assert count(epochs[1], batch(8)) == 2

    def test_the_largest_number_of_micro_batches(self) -> None:
        helper = batcher()
        assert helper.most(batch(8)) == (8, 8, "")
        assert helper.most(()) == (None, 1, "")
        size, most, reason = helper.most((torch.zeros(()),))
        assert (size, most) == (None, 1)
        assert reason


class TestDecisions:
    def test_the_first_callback_that_decides_does(self) -> None:
        helper = batcher(Answers(None), Answers(4), Answers(8))
        assert helper.ask(event(helper, batch(8), 1)) == Split(4)

    def test_smaller_micro_batches_begin_to_count_anew(self) -> None:
        helper = batcher(Answers(*[2] * 5, 4))
        counts = [2] * 6 + [4] * 5
        decisions = [helper.ask(event(helper, batch(8), number)) for number in counts]
        assert None not in decisions

    def test_armed_are_runs_with_a_callback_that_decides(self) -> None:
        for callback, recovers in ((Answers(None), True), (Callback(), False)):
            *_, hooks = parts_of_fit(Mlp(), callbacks=[callback])
            assert hooks.recovers is recovers
