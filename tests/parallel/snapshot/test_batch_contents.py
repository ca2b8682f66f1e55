"""The contents of a batch's containers come back, in the same objects and without copies of tensors."""

from collections import UserDict, deque
from typing import Any

import torch
from torch.nn.utils.rnn import pack_sequence

from equipoise.parallel.snapshot.batch_contents import BatchContents
from tests.support.nested import Frozen, Pair, Sample


def test_containers_of_every_kind_are_restored() -> None:
    tensor = torch.ones(2)
    user = UserDict(x=tensor)
    queue = deque([tensor, 1], maxlen=2)
    sample = Sample(tensor, "label")
    frozen = Frozen([1])
    pair = Pair([tensor], {"y": 2})
    packed = {"sequence": (sequence := pack_sequence([torch.ones(2, 1), torch.ones(1, 1)])), "last": 1}
    contents = BatchContents((user, queue, sample, frozen, pair, packed))
    del user["x"]
    queue.append(5)
    del sample.inner
    sample.note = None
    object.__setattr__(frozen, "inner", None)
    pair.first.pop()
    pair.second["y"] = 3
    del packed["sequence"]
    contents.restore()
    assert user["x"] is tensor
    assert list(queue) == [tensor, 1]
    assert sample.inner is tensor
    assert sample.note == "label"
    assert frozen.inner == [1]
    assert pair == ([tensor], {"y": 2})
    assert packed["sequence"] is sequence
    assert list(packed) == ["sequence", "last"]


def test_what_was_taken_out_can_be_noted_where_it_is() -> None:
    batch = {"inner": [1, 2, 3]}
    before = BatchContents(batch)
    inner = batch.pop("inner")
    inner.pop()
    present = before.now()
    before.restore()
    assert batch == {"inner": [1, 2, 3]}
    present.restore()
    assert (batch, inner) == ({}, [1, 2])


class Sealed(dict[str, Any]):
    """A mapping that refuses to be emptied, as the outputs of some libraries do."""

    def clear(self) -> None:
        raise TypeError("not to be emptied")


def test_what_was_not_changed_is_not_touched() -> None:
    BatchContents((3, torch.ones(2), Sample, Sealed(x=1))).restore()


def test_a_batch_that_contains_itself_is_restored() -> None:
    batch: dict[str, Any] = {"x": [1]}
    sample = Sample(torch.ones(1), note=batch)
    batch["sample"] = sample
    contents = BatchContents((batch,))
    sample.note = None
    batch["x"].pop()
    batch.clear()
    contents.restore()
    assert (batch["x"], batch["sample"] is sample, sample.note is batch) == ([1], True, True)
