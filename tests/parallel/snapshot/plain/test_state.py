"""State as plain data."""

import pickle

from equipoise.parallel.snapshot.plain.paths import Root
from equipoise.parallel.snapshot.plain.state import UNKNOWN, PlainState, saved_values


class Curriculum:
    """Object of a user."""

    level = 1


def test_a_start_that_was_not_noted_stays_so_in_another_process() -> None:
    curriculum = Curriculum()
    curriculum.level = 1
    state = PlainState()
    state.mark({"data": Root(curriculum)}, with_starts=False)
    state = pickle.loads(pickle.dumps(state))
    curriculum.level = 2
    changes = state.changes({"data": Root(curriculum)})
    assert changes["values"] == [[["data", "level"], 2, False, True]]
    assert [value.start for value in saved_values(changes)] == [UNKNOWN]
