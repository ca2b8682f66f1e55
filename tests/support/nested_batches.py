"""Nested batches of any form, drawn by hypothesis."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, fields
from typing import Any

from hypothesis import strategies as st

from tests.support.nested import Frozen, Pair, Sample

__all__ = ["nested"]


class Named(dict[str, Any]):
    """A mapping with an attribute of its own."""

    origin = "nowhere"


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """Like those of transformers: keys and attributes in one, and `update` refused."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for each in fields(self):
            super().__setitem__(each.name, getattr(self, each.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise Exception("You cannot use `update` on a ModelOutput instance.")

    def __reduce__(self) -> Any:
        call, _, *remaining = super().__reduce__()
        return call, tuple(getattr(self, each.name) for each in fields(self)), *remaining


@dataclass(frozen=True, slots=True)
class Slotted:
    inner: Any
    note: str = "x"


def nested(leaves: st.SearchStrategy[Any], *, lists: bool = True) -> st.SearchStrategy[Any]:
    """Values in containers of every kind, in one another.

    Args:
        leaves: The values.
        lists: Whether lists are among the containers. Default: True.
    """

    def wrap(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        items = st.lists(inner, min_size=not lists, max_size=3)
        by_name = st.dictionaries(st.text("ab", max_size=2), inner, max_size=3)
        kinds = [by_name.map(kind) for kind in (dict, UserDict, OrderedDict, Named)]
        kinds += [inner.map(kind) for kind in (Sample, Frozen, Slotted)]
        kinds += [by_name.map(lambda values: defaultdict(list, values)), st.tuples(inner, inner).map(Pair._make)]
        kinds += [st.tuples(inner, inner).map(lambda pair: ModelOutput(*pair)), items.map(tuple)]
        return st.one_of(*kinds, *([items] if lists else []))

    return st.recursive(leaves, wrap, max_leaves=10)
