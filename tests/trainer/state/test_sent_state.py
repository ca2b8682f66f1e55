"""Fields that stay in a process, and fields that come back from one."""

import pickle
from dataclasses import dataclass, field
from typing import Any

from equipoise.trainer.evaluation.evaluation_loop import EvaluationLoop
from equipoise.trainer.evaluation.prediction_loop import PredictionLoop
from equipoise.trainer.state.run_state import RunState
from equipoise.trainer.state.sent_state import LOCAL, LOCAL_RESULT, RESULT, SentState


@dataclass
class Reading(SentState):
    """One field of each kind."""

    name: str = "a"
    file: Any = field(default=None, metadata=LOCAL)
    lines: list[int] = field(default_factory=list, metadata=RESULT)
    warnings: list[str] = field(default_factory=list, metadata=LOCAL_RESULT)


def test_another_process_begins_with_the_defaults_of_local_fields() -> None:
    reading = Reading(name="b", file=lambda: None, lines=[1], warnings=["w"])
    copy = pickle.loads(pickle.dumps(reading))
    assert (copy.name, copy.file, copy.lines, copy.warnings) == ("b", None, [1], [])


def test_results_are_the_marked_fields() -> None:
    reading = Reading(name="b", lines=[1], warnings=["w"])
    assert reading.results() == {"lines": [1], "warnings": ["w"]}


def test_results_of_loops() -> None:
    state = RunState()
    loop = EvaluationLoop(state, "val", fitting=True)
    assert set(loop.results()) == {"progress", "collection", "num_batches", "has_run"}
    # The counters of a validation inside a fit are those of the fit.
    assert loop.progress is state.progress.val_batch
    assert set(PredictionLoop(state).results()) == {"progress", "max_batches"}
