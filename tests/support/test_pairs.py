"""Each pair of values occurs, in few cases, and always in the same ones."""

from itertools import combinations, product

import pytest

from tests.support.pairs import pairwise


@pytest.mark.parametrize(
    ("values", "cases"),
    [
        (("ab", [1, 2]), 4),
        (("ab", [1, 2], [False, True]), 4),
        (("abcd", range(5), "xyz", [None, True]), 22),
        (([1], "ab", [None]), 2),
    ],
)
def test_all_pairs_occur(values: tuple[object, ...], cases: int) -> None:
    lists = [list(each) for each in values]  # type: ignore[call-overload]
    chosen = pairwise(*lists)
    assert chosen == pairwise(*lists)
    assert len(set(chosen)) == len(chosen) <= cases
    for one, other in combinations(range(len(lists)), 2):
        assert {(case[one], case[other]) for case in chosen} == set(product(lists[one], lists[other]))


def test_values_need_not_be_hashable() -> None:
    assert pairwise([{}, {"a": 1}], [[]]) == [({}, []), ({"a": 1}, [])]
