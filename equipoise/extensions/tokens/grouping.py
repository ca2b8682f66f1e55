"""Sequences in groups within a budget of tokens: by the longest of a group, or by their sum.

The numbers and sizes of groups follow from the lengths alone. So each epoch has as many batches, whatever its order.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Sequence

__all__ = ["group_by_longest", "group_by_sum", "group_in_order", "join_rows"]


def group_by_longest(lengths: Sequence[int], budget: int, most: float) -> list[list[int]]:
    """Return groups of positions, in which the longest length times the number of positions is within a budget.

    A length over the budget has a group of its own.

    Args:
        lengths: The lengths, the longest first.
        budget: Tokens of a group.
        most: Largest number of positions of a group.

    Example:
        >>> group_by_longest([5, 4, 2, 2, 1], budget=8, most=3)
        [[0], [1, 2], [3, 4]]
    """
    groups = []
    begin = 0
    while begin < len(lengths):
        count = min(budget // lengths[begin], most)
        # A length over the budget has a group, too.
        end = begin + max(1, int(count))
        end = min(end, len(lengths))
        groups.append(list(range(begin, end)))
        begin = end
    return groups


def group_by_sum(lengths: Sequence[int], budget: int, most: float = math.inf) -> list[list[int]]:
    """Return groups of positions whose lengths add up to a budget at most, by best-fit decreasing.

    Each length joins the group that has the least room for it (D. S. Johnson, "Near-optimal bin packing algorithms",
    1973). A length over the budget has a group of its own.

    Args:
        lengths: The lengths, the longest first.
        budget: Tokens of a group.
        most: Largest number of positions of a group. Default: any.

    Example:
        >>> group_by_sum([6, 5, 3, 2, 2], budget=8, most=3)
        [[0, 3], [1, 2], [4]]
    """
    groups: list[list[int]] = []
    # Groups that have room, by their free tokens; `rooms` are these numbers in order.
    groups_by_room: dict[int, list[list[int]]] = {}
    rooms: list[int] = []
    for position, length in enumerate(lengths):
        # 1. Find the group.
        index = bisect_left(rooms, length)
        if index < len(rooms):
            room = rooms[index]
            waiting = groups_by_room[room]
            group = waiting.pop()
            if not waiting:
                del rooms[index]
        else:
            room = budget
            group = []
            groups.append(group)
        group.append(position)
        # 2. Note what room it has left.
        room -= length
        if room <= 0 or len(group) >= most:
            continue
        waiting = groups_by_room.setdefault(room, [])
        if not waiting:
            insort(rooms, room)
        waiting.append(group)
    return groups


def group_in_order(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return groups of neighbouring positions whose lengths add up to a budget at most. No other division has fewer.

    Example:
        >>> group_in_order([2, 6, 3, 5], budget=8)
        [[0, 1], [2, 3]]
    """
    groups: list[list[int]] = []
    # There is no group yet; a length of 0 needs one, too.
    room = -1
    for position, length in enumerate(lengths):
        if length > room:
            groups.append([])
            room = budget
        groups[-1].append(position)
        room -= length
    return groups


def join_rows(rows: Sequence[list[int]], count: int, most: float) -> list[list[int]]:
    """Return groups of a number of rows each, fewer where a group would have too many positions.

    Args:
        rows: The positions of each row.
        count: Largest number of rows of a group.
        most: Largest number of positions of a group that has several rows.

    Example:
        >>> join_rows([[0], [1, 4], [2, 3]], count=2, most=10)
        [[0, 1, 4], [2, 3]]
    """
    groups: list[list[int]] = []
    rows_left = 0
    for row in rows:
        is_full = not rows_left
        if groups and len(groups[-1]) + len(row) > most:
            is_full = True
        if is_full:
            groups.append([])
            rows_left = count
        groups[-1].extend(row)
        rows_left -= 1
    return groups
