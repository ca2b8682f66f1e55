"""Sizes of nested batches are found where all tensors agree, and never guessed; parts are what was cut, in order."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from equipoise.errors import StepError
from equipoise.parallel.batches.splitting import Splitter, infer_batch_size
from tests.support.nested import Sample
from tests.support.trainer_runs import refuses


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        ((torch.tensor(5.0), torch.tensor(5.0)), None),
        ((torch.nn.Parameter(torch.zeros(3)), torch.zeros(3)), 3),
        ([torch.zeros(3, 10, 12), torch.zeros(3, 8, 9)], 3),
        ([torch.zeros(10, 12), torch.zeros(8, 9), torch.zeros(7, 7)], None),  # a list of unequal images
        (Sample, None),  # a class is no sample
        ((), None),
        ("text", None),
        ({"a": torch.zeros(2), "b": [Sample(torch.zeros(3))]}, None),
        (torch.zeros(0, 3), 0),
        (torch.zeros(3).to_sparse(), 3),
    ],
)
def test_the_size_of_a_batch_or_none(batch: Any, size: int | None) -> None:
    assert infer_batch_size(batch) == size


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_the_size_of_nested_tensors(layout: torch.layout) -> None:
    ragged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(5), torch.zeros(1)], layout=layout)
    assert infer_batch_size(ragged) == 3
    assert infer_batch_size((ragged, torch.zeros(3))) == 3
    assert infer_batch_size({"a": ragged, "b": torch.zeros(4)}) is None


# Parts


def test_the_dimension_of_samples_need_not_be_the_first() -> None:
    splitter = Splitter(nn.Linear(2, 2), dim=1)
    batch = {"x": torch.zeros(7, 4, 2), "y": torch.zeros(3, 4), "z": torch.tensor(1.0)}
    assert (splitter.size(batch), splitter.size_to_cut(batch)) == (4, 4)
    assert splitter.size([torch.zeros(4), torch.zeros(3, 4)]) is None  # has no second dimension
    assert splitter.size(torch.tensor(1.0)) is None
    parts = splitter.parts(batch, [1, 3])
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
        if size is not None:
            self.batch_size = lambda batch: size
        if parts is not None:
            self.split_batch = lambda batch, sizes: parts


IMAGES = [torch.zeros(3, 10, 12), torch.zeros(3, 8, 9)]
TARGETS = [
    {"boxes": torch.zeros(5, 4), "labels": torch.zeros(5)},
    {"boxes": torch.zeros(1, 4), "labels": torch.zeros(1)},
]
GREY = [torch.zeros(1, 10, 12), torch.zeros(1, 8, 9), torch.zeros(1, 8, 8)]


def test_a_setting_of_the_same_name_is_no_method() -> None:
    class WithSetting(nn.Module):
        batch_size = 32

    assert Splitter(WithSetting()).size_to_cut(torch.zeros(4)) == 4


def test_one_method_of_the_module_suffices_where_the_tensors_agree() -> None:
    batch = torch.zeros(4, 2)
    cuts, counts = Splitter(Module(parts=["a", "b"])), Splitter(Module(size=4))
    assert cuts.size_to_cut(batch) == counts.size_to_cut(batch) == 4
    assert cuts.parts(batch, [1, 3]) == ["a", "b"]
    assert [len(part) for part in counts.parts(batch, [3, 1])] == [3, 1]


# What cannot be cut

UNEQUAL = {"ids": torch.zeros(4, 7), "weights": [torch.zeros(4), Sample(torch.zeros(3))]}
PACKED = pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])
SIZES = "batch['ids'] is of length 4, batch['weights'][0] is of length 4, batch['weights'][1].inner is of length 3"
SAMPLES = "it holds whole samples"
UNCUT: dict[str, tuple[Any, int, list[str]]] = {
    "unequal lengths": (UNEQUAL, 0, ["must be cut along dimension 0, but its tensors differ there", SIZES]),
    "too few dimensions": (
        (torch.zeros(4, 2), torch.zeros(4)),
        1,
        ["along dimension 1", "batch[0] is of length 2, batch[1] has 1 dimensions"],
    ),
    "nothing but a number": ({"loss": torch.tensor(1.0)}, 0, ["there is no tensor in this dict"]),
    "grey images": (GREY, 0, [SAMPLES, "batch[2] is of length 1"]),
    "images and targets": ((IMAGES, TARGETS), 0, [SAMPLES, "batch[1][1]['labels'] is of length 1"]),
    "images by name": ({"images": IMAGES}, 0, [SAMPLES, "batch['images'][1] is of length 3"]),
    "packed sequences and labels": (
        (PACKED, torch.zeros(2)),
        0,
        ["packed sequence", "batch[0][0] is of length 4, batch[0][1] is of length 3", "batch[1] is of length 2"],
    ),
    "many": ([torch.zeros(n) for n in range(1, 10)], 0, ["batch[5] is of length 6, and 3 more."]),
}


@pytest.mark.parametrize("case", UNCUT)
def test_what_cannot_be_cut_names_its_entries(case: str) -> None:
    batch, dim, expected = UNCUT[case]
    remedies = ("Define `batch_size(self, batch)`", "`split_batch(self, batch, sizes)`")
    refuses(lambda: Splitter(nn.Linear(1, 1), dim).size_to_cut(batch), *expected, *remedies, error=StepError)


FOUR = torch.zeros(4)
TWO_PARTS = "`split_batch(batch, sizes=[3, 1])` of the module must return 2 parts, but returned"
REFUSED: list[tuple[Callable[[], Any], str]] = [
    *(
        (lambda size=size: Splitter(Module(size=size)).size(FOUR), f"must return the number of samples, not {size!r}.")
        for size in (2.0, True, -1, torch.tensor(2))
    ),
    (lambda: Splitter(Module(size=4, parts=["a"])).parts(FOUR, [3, 1]), f"{TWO_PARTS} 1."),
    (lambda: Splitter(Module(size=4, parts=["a"] * 3)).parts(FOUR, [3, 1]), f"{TWO_PARTS} 3."),
    (
        lambda: Splitter(Module(size=4)).size_to_cut(torch.zeros(5, 4)),
        "says 4, but the tensors of the batch are of length 5 along dimension 0. Define `split_batch",
    ),
    (lambda: Splitter(Module(size=4)).size_to_cut((FOUR, torch.zeros(2))), "are of length None along"),
    (lambda: Splitter(nn.Module()).parts((PACKED, torch.zeros(2)), [1, 1]), "pack them within the module. Or define"),
]


@pytest.mark.parametrize(("use", "words"), REFUSED, ids=range(len(REFUSED)))
def test_methods_of_the_module_that_contradict_the_batch_are_refused(use: Callable[[], Any], words: str) -> None:
    refuses(use, words, error=StepError)


@pytest.mark.parametrize(
    "batch",
    [
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
    refuses(lambda: splitter.size_to_cut(batch), SAMPLES, error=StepError)
    assert splitter.size_to_cut([torch.zeros(8, 10, 12), torch.zeros(8, 10, 12)]) == 8
    assert splitter.size_to_cut(batch) == 3
    refuses(lambda: splitter.size_to_cut(GREY), SAMPLES, error=StepError)
