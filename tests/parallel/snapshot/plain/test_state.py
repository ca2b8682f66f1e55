"""State as plain data."""

import pickle

import torch
from torch import nn

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


def test_views_of_weights_are_saved_with_these_alone() -> None:
    layer = nn.Linear(3, 2)
    layer.row = layer.weight.detach()[0]
    state = PlainState()
    state.mark({"layer": Root(layer)})
    with torch.no_grad():
        layer.weight.mul_(0.5)
    assert not state.changes({"layer": Root(layer)})["values"]


def test_a_generator_has_changed_once_it_has_drawn() -> None:
    curriculum = Curriculum()
    curriculum.generator = torch.Generator()
    state = PlainState()
    state.mark({"data": Root(curriculum)})
    # It is read again into other memory.
    kept = [curriculum.generator.get_state() for _ in range(3)]
    assert not state.changes({"data": Root(curriculum)})["generators"]
    torch.rand((), generator=curriculum.generator)
    path, changed = state.changes({"data": Root(curriculum)})["generators"][0]
    assert path == ["data", "generator"]
    assert not torch.equal(changed, kept[0])
