"""Sizes of nested batches are found where all tensors agree, and never guessed; parts are what was cut, in order."""

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from equipoise.errors import StepError
from equipoise.parallel.batches.splitting import Splitter, infer_batch_size, split
from equipoise.tree import entries_of
from tests.support.nested import Frozen, Pair, Sample


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def wrap(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        keys = st.text(max_size=2)
        return st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(UserDict),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
            st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
            inner.map(Sample),
            inner.map(Frozen),
        )

    return st.recursive(leaves, wrap, max_leaves=10)


def tensors_of_size(size: int) -> st.SearchStrategy[torch.Tensor]:
    return st.lists(st.integers(0, 3), max_size=2).map(lambda rest: torch.zeros(size, *rest))


others = st.none() | st.integers() | st.text(max_size=4) | st.just(torch.tensor(1.0)) | st.just(torch.nn.Linear(3, 2))


@settings(deadline=None)
@given(data=st.data(), size=st.integers(0, 5))
def test_the_size_that_all_tensors_share(data: st.DataObject, size: int) -> None:
    batch = data.draw(nested(tensors_of_size(size) | others))
    batched = [tensor for _, tensor in entries_of(batch) if tensor.ndim]
    assert infer_batch_size(batch) == (size if batched else None)
    assert infer_batch_size((torch.zeros(size, 2), batch)) == size


@settings(deadline=None)
@given(data=st.data(), size=st.integers(0, 5), other=st.integers(0, 5))
def test_one_tensor_of_another_size_forbids_a_guess(data: st.DataObject, size: int, other: int) -> None:
    batch = data.draw(nested(tensors_of_size(size) | others))
    batch = data.draw(st.sampled_from([(batch, torch.zeros(other)), {"a": torch.zeros(other), "b": batch}]))
    batch = [Sample(batch), torch.zeros(size)]
    assert infer_batch_size(batch) == (size if size == other else None)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ((torch.tensor(5.0), torch.tensor(5.0)), None),
        ((torch.nn.Parameter(torch.zeros(3)), torch.zeros(3)), 3),
        ([torch.zeros(3, 10, 12), torch.zeros(3, 8, 9)], 3),
        ([torch.zeros(10, 12), torch.zeros(8, 9), torch.zeros(7, 7)], None),  # a list of unequal images
        (Sample, None),  # a class is no sample
        ((), None),
        ({}, None),
        (None, None),
        ("text", None),
        (torch.zeros(0, 3), 0),
        (torch.zeros(3).to_sparse(), 3),
    ],
)
def test_sizes(batch: Any, size: int | None) -> None:
    assert infer_batch_size(batch) == size


def test_a_field_made_after_construction_counts() -> None:
    sample = Sample(torch.zeros(2))
    sample.derived = torch.zeros(3)
    assert infer_batch_size(sample) is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    ragged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(5), torch.zeros(1)], layout=layout)
    assert infer_batch_size(ragged) == 3
    assert infer_batch_size((ragged, torch.zeros(3))) == 3
    assert infer_batch_size({"a": ragged, "b": torch.zeros(4)}) is None


# Parts


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


CONTAINERS: dict[str, tuple[Callable[[Tensor, Any], Any], Callable[[Any], Tensor], Callable[[Any], Any]]] = {
    "a dict of one's own": (lambda t, o: Named(t=t, o=o), lambda b: b["t"], lambda b: b["o"]),
    "defaultdict": (lambda t, o: defaultdict(list, t=t, o=o), lambda b: b["t"], lambda b: b["o"]),
    "frozen dataclass": (Slotted, lambda b: b.inner, lambda b: b.note),
    "model output": (ModelOutput, lambda b: b.logits, lambda b: b["loss"]),
    "nested": (
        lambda t, o: [{"a": Sample(Pair((o,), UserDict(x=(t,))))}],
        lambda b: b[0]["a"].inner.second["x"][0],
        lambda b: b[0]["a"].inner.first[0],
    ),
}


OTHERS = [object(), None, "text", 3, torch.tensor(2.0), nn.Linear(2, 2)]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_part_is_a_container_of_the_same_kind(kind: str) -> None:
    make, tensor_in, other_in = CONTAINERS[kind]
    tensor = torch.arange(12.0).reshape(6, 2).clone()
    for other in OTHERS:
        batch = make(tensor, other)
        parts = split(batch, [1, 3, 2])
        assert [type(part) for part in parts] == [type(batch)] * 3
        assert all(map(torch.equal, map(tensor_in, parts), (tensor[:1], tensor[1:4], tensor[4:])))
        assert all(tensor_in(part)._base is tensor for part in parts)  # views
        assert all(other_in(part) is other for part in parts)
        assert tensor_in(batch) is tensor  # what was cut is as it was


def leaves_of(batch: Any) -> list[Any]:
    """Everything in a batch that is no container."""
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in leaves_of(value)]
    if isinstance(batch, (tuple, list)):
        return [leaf for value in batch for leaf in leaves_of(value)]
    if is_dataclass(batch) and not isinstance(batch, type):
        return [leaf for each in fields(batch) for leaf in leaves_of(getattr(batch, each.name))]
    return [batch]


@settings(deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4), dim=st.integers(0, 1))
def test_parts_come_together_again(data: st.DataObject, sizes: list[int], dim: int) -> None:
    size = sum(sizes)
    shapes = st.integers(0, 3).map(lambda rest: torch.rand((size, rest) if dim == 0 else (rest, size)))
    batch = data.draw(nested(shapes | others))
    parts = split(batch, sizes, dim)
    assert len(parts) == len(sizes)
    assert all(type(part) is type(batch) for part in parts)
    for whole, *cut in zip(leaves_of(batch), *map(leaves_of, parts), strict=True):
        if isinstance(whole, Tensor) and whole.ndim:
            assert [tensor.size(dim) for tensor in cut] == sizes
            assert torch.equal(torch.cat(cut, dim), whole)
        else:
            assert all(leaf is whole for leaf in cut)


def test_samples_need_not_come_first() -> None:
    batch = {"x": torch.zeros(7, 4, 2), "y": torch.zeros(3, 4), "z": torch.tensor(1.0)}
    assert infer_batch_size(batch, 1) == 4
    assert infer_batch_size(batch) is None
    assert infer_batch_size([torch.zeros(4), torch.zeros(3, 4)], 1) is None  # has no second dimension
    assert infer_batch_size((torch.zeros(3, 4), torch.zeros(2, 5)), 1) is None
    parts = split(batch, [1, 3], 1)
    assert [tuple(part["x"].shape) for part in parts] == [(7, 1, 2), (7, 3, 2)]
    assert [tuple(part["y"].shape) for part in parts] == [(3, 1), (3, 3)]


# As the module says


class Module:
    """A module that may say how its batches are cut.

    Args:
        size: What `batch_size` returns; no such method if it is None.
        parts: What `split_batch` returns.
    """

    def __init__(self, size: Any = None, parts: Any = None) -> None:
        self.asked: list[Any] = []
        if size is not None:
            self.batch_size = lambda batch: self.asked.append(batch) or size
        if parts is not None:
            self.split_batch = lambda batch, sizes: self.asked.append((batch, sizes)) or parts


IMAGES = [torch.zeros(3, 10, 12), torch.zeros(3, 8, 9)]
TARGETS = [
    {"boxes": torch.zeros(5, 4), "labels": torch.zeros(5)},
    {"boxes": torch.zeros(1, 4), "labels": torch.zeros(1)},
]
GREY = [torch.zeros(1, 10, 12), torch.zeros(1, 8, 9), torch.zeros(1, 8, 8)]


def test_without_methods_the_tensors_say_it() -> None:
    splitter, batch = Splitter(nn.Linear(2, 2), dim=1), (torch.zeros(2, 5), torch.zeros(3, 5))
    assert (splitter.size(batch), splitter.size_to_cut(batch)) == (5, 5)
    assert [part[1].shape for part in splitter.parts(batch, [4, 1])] == [(3, 4), (3, 1)]
    assert splitter.size(torch.tensor(1.0)) is None


def test_a_setting_of_the_same_name_is_no_method() -> None:
    class WithSetting(nn.Module):
        batch_size = 32

    assert Splitter(WithSetting()).size_to_cut(torch.zeros(4)) == 4


def test_the_modules_methods_are_asked() -> None:
    module, batch = Module(size=2, parts=iter([IMAGES[:1], IMAGES[1:]])), (IMAGES, TARGETS)
    splitter = Splitter(module)
    assert (splitter.size(batch), splitter.size_to_cut(batch)) == (2, 2)
    parts = splitter.parts(batch, (1, 1))
    assert parts == [IMAGES[:1], IMAGES[1:]]
    assert module.asked[0] is batch
    assert module.asked[-1] == (batch, [1, 1])


def test_the_modules_cut_suffices_where_the_size_is_clear() -> None:
    splitter = Splitter(Module(parts=["a", "b"]))
    assert splitter.size_to_cut(torch.zeros(4, 2)) == 4
    assert splitter.parts(torch.zeros(4, 2), [1, 3]) == ["a", "b"]


def test_the_modules_size_suffices_where_the_tensors_agree() -> None:
    splitter = Splitter(Module(size=4))
    assert splitter.size_to_cut(torch.zeros(4, 2)) == 4
    assert [len(part) for part in splitter.parts(torch.zeros(4, 2), [3, 1])] == [3, 1]


@pytest.mark.parametrize("size", [2.0, "2", True, -1, torch.tensor(2), (2,)])
def test_a_size_that_is_no_number_of_samples(size: Any) -> None:
    with pytest.raises(StepError, match=r"`batch_size\(batch\)` of the module must return the number of samples, not "):
        Splitter(Module(size=size)).size(torch.zeros(2))


@pytest.mark.parametrize("parts", [[], ["a"], ["a", "b", "c"]])
def test_another_number_of_parts(parts: list[Any]) -> None:
    expected = rf"`split_batch\(batch, sizes=\[3, 1\]\)` of the module must return 2 parts, but returned {len(parts)}\."
    with pytest.raises(StepError, match=expected):
        Splitter(Module(size=4, parts=parts)).parts(torch.zeros(4), [3, 1])


@pytest.mark.parametrize(("batch", "found"), [(torch.zeros(5, 4), "5"), ((torch.zeros(5), torch.zeros(2)), "None")])
def test_a_size_that_the_tensors_contradict(batch: Any, found: str) -> None:
    expected = rf"says 4, but the tensors of the batch are of length {found} along dimension 0\. Define `split_batch"
    with pytest.raises(StepError, match=expected):
        Splitter(Module(size=4)).size_to_cut(batch)


# What cannot be cut

UNCUT: dict[str, tuple[Any, int, list[str]]] = {
    "unequal lengths": (
        {"ids": torch.zeros(4, 7), "weights": [torch.zeros(4), Sample(torch.zeros(3))]},
        0,
        [
            "must be cut along dimension 0, but its tensors differ there",
            "batch['ids'] is of length 4, batch['weights'][0] is of length 4, batch['weights'][1].inner is of length 3",
        ],
    ),
    "too few dimensions": (
        (torch.zeros(4, 2), torch.zeros(4)),
        1,
        ["along dimension 1", "batch[0] is of length 2, batch[1] has 1 dimensions"],
    ),
    "no tensor": (["a", 3], 0, ["there is no tensor in this list"]),
    "nothing but a number": ({"loss": torch.tensor(1.0)}, 0, ["there is no tensor in this dict"]),
    "images": (IMAGES, 0, ["it holds whole samples", "batch[0] is of length 3, batch[1] is of length 3"]),
    "grey images": (GREY, 0, ["it holds whole samples", "batch[2] is of length 1"]),
    "images and targets": ((IMAGES, TARGETS), 0, ["it holds whole samples", "batch[1][1]['labels'] is of length 1"]),
    "images by name": ({"images": IMAGES}, 0, ["it holds whole samples", "batch['images'][1] is of length 3"]),
    "images in a list of their own": ([IMAGES, torch.zeros(3)], 0, ["it holds whole samples"]),
    "packed sequences": (pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)]), 0, ["packed sequence"]),
    "a packed sequence of equal steps": (pack_sequence([torch.zeros(4, 2)]), 0, ["packed sequence"]),
    "packed sequences and labels": (
        (pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)]), torch.zeros(2)),
        0,
        ["packed sequence", "batch[0][0] is of length 4, batch[0][1] is of length 3", "batch[1] is of length 2"],
    ),
    "many": ([torch.zeros(n) for n in range(1, 10)], 0, ["batch[5] is of length 6, and 3 more."]),
}


@pytest.mark.parametrize("case", UNCUT)
def test_what_cannot_be_cut_names_its_entries(case: str) -> None:
    batch, dim, expected = UNCUT[case]
    with pytest.raises(StepError) as caught:
        Splitter(nn.Linear(1, 1), dim).size_to_cut(batch)
    message = str(caught.value)
    for part in [*expected, "Define `batch_size(self, batch)`", "`split_batch(self, batch, sizes)`"]:
        assert part in message


@pytest.mark.parametrize(
    "batch",
    [
        [torch.zeros(5, 10, 12), torch.zeros(5, 10, 12)],  # (input, target) of five samples
        [torch.zeros(5, 10, 12), torch.zeros(5, 8, 9)],  # no images
        (torch.zeros(3, 10, 12), torch.zeros(3, 8, 9)),  # a tuple is not a list of samples
        [torch.zeros(3, 10, 12), torch.zeros(3)],
    ],
)
def test_what_only_looks_like_images_is_cut(batch: Any) -> None:
    assert Splitter(nn.Linear(1, 1)).size_to_cut(batch) == batch[0].size(0)


def test_equal_images_or_three_samples() -> None:
    """Input and target of a last batch of three look like two images; what came before tells."""
    splitter, batch = Splitter(nn.Linear(1, 1)), [torch.zeros(3, 10, 12), torch.zeros(3, 10, 12)]
    with pytest.raises(StepError, match="it holds whole samples"):
        splitter.size_to_cut(batch)
    assert splitter.size_to_cut([torch.zeros(8, 10, 12), torch.zeros(8, 10, 12)]) == 8
    assert splitter.size_to_cut(batch) == 3
    with pytest.raises(StepError, match="it holds whole samples"):
        splitter.size_to_cut(GREY)


def test_a_packed_sequence_is_not_cut_by_steps() -> None:
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])
    splitter = Splitter(nn.Module())
    with pytest.raises(StepError, match=r"holds a PackedSequence.*pack them within the module\. Or define `batch_size"):
        splitter.parts((packed, torch.zeros(2)), [1, 1])
