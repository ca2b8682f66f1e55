"""Members have the attributes of the module when a step begins, whatever the steps before have set."""

import random
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.extensions.ensemble.members.stacked_members import StackedMembers

MEMBERS = 3
STRUCTURE = ("_parameters", "_buffers", "_modules")


def stacked(module: nn.Module) -> StackedMembers:
    states = [{name: value.clone() for name, value in module.state_dict().items()} for _ in range(MEMBERS - 1)]
    return StackedMembers(module, states, torch.device("cpu"))


@pytest.fixture
def members() -> StackedMembers:
    module = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.Linear(2, 1)))
    # They refer to a part of the module.
    module.last = [module[1][1]]  # type: ignore[assignment]
    module[1].first = module[0]
    return stacked(module)


def own(member: nn.Module) -> list[dict[str, Any]]:
    return [{key: value for key, value in vars(part).items() if key not in STRUCTURE} for part in member.modules()]


def check(members: StackedMembers) -> None:
    first, *others = members.modules
    for other in others:
        twins = dict(zip(map(id, first.modules()), other.modules(), strict=True))
        for expected, found in zip(own(first), own(other), strict=True):
            assert list(found) == list(expected)
            for name, value in expected.items():
                if name == "last":
                    assert [twins.get(id(item), item) for item in value] == found[name]
                else:
                    assert found[name] is twins.get(id(value), value), name


def test_random_changes_of_any_member(members: StackedMembers) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    members.refresh()
    for _ in range(150):
        for _ in range(draw.randrange(3)):
            member = draw.choice(members.modules)
            part = draw.choice(list(member.modules()))
            name = draw.choice("abc")
            # Equal objects that are not the same, and objects that are.
            value = draw.choice([None, 1, True, 1.0, [], ["x"]])
            if draw.random() < 0.4:
                vars(part).pop(name, None)
            else:
                setattr(part, name, value)
        members.refresh()
        check(members)


def test_other_items_of_a_container(members: StackedMembers) -> None:
    first = members.modules[0]
    members.refresh()
    check(members)
    # Neither the list nor its length is another one.
    first.last[0] = first[0]  # type: ignore[index, operator]
    members.refresh()
    check(members)
    first.last.append(3)  # type: ignore[operator, union-attr]
    members.refresh()
    check(members)


def test_a_last_attribute_of_another_name(members: StackedMembers) -> None:
    first = members.modules[0]
    first.before = None  # type: ignore[assignment]
    members.refresh()
    # As many attributes, with the same values.
    del first.before
    first.after = None  # type: ignore[assignment]
    members.refresh()
    check(members)


def test_what_a_step_has_set_is_seen(members: StackedMembers) -> None:
    members.refresh()
    noted = [members.attributes_of(member, [0, 1]) for member in range(MEMBERS)]
    assert all(attributes.are_unchanged() for attributes in noted)
    members.modules[1][0].factor = 2.0  # type: ignore[index, union-attr]
    assert [attributes.are_unchanged() for attributes in noted] == [True, False, True]
    assert members.has_other_attributes(1, [0, 1])
    members.refresh()
    assert all(attributes.are_unchanged() for attributes in noted)
    # Of another part.
    members.modules[2][1].factor = 2.0  # type: ignore[index, union-attr]
    assert all(attributes.are_unchanged() for attributes in noted)


def test_parameters_that_are_frozen_are_frozen_in_all_members(members: StackedMembers) -> None:
    weight = members.modules[0][0].weight  # type: ignore[index, union-attr]
    for is_trained in (False, True):
        weight.requires_grad_(is_trained)
        members.refresh()
        assert [member[0].weight.requires_grad for member in members.modules] == [is_trained] * MEMBERS  # type: ignore[index, union-attr]
