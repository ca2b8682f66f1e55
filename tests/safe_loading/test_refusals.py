"""Pickles and archives that no version of torch writes: each is refused for its own reason, or means plain data."""

import collections
import io
import pickle
import re
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise import CheckpointError
from equipoise.safe_loading.archive import check_archive, read_archive
from equipoise.safe_loading.stand_in import StandIn
from equipoise.safe_loading.unpickler import load_pickle

# Pickles, instruction by instruction. `pickletools.dis` shows them in words.
COUNTER = b"ccollections\nCounter\n"
NAMESPACE = b"cargparse\nNamespace\n"
RECONSTRUCTED = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"

PLAIN = {
    "a mark that is removed": (b"(0N.", None),
    "items that are removed with their mark": (b"(K\x01K\x02\x31K\x05.", 5),
    "an object without keyword arguments": (NAMESPACE + b")}\x92.", Namespace()),
    "a dictionary of pairs": (b"ccollections\nOrderedDict\n]](K\x01K\x02ea\x85R.", collections.OrderedDict({1: 2})),
    "a dictionary without a factory": (b"ccollections\ndefaultdict\nN\x85R.", {}),
    "a queue with a length": (b"ccollections\ndeque\n(](K\x01K\x02eK\x01tR.", collections.deque([2], 1)),
    "a path of Python 3.13": (b"cpathlib._local\nPosixPath\n(X\x04\x00\x00\x00datatR.", Path("data")),
    "bytes of a list": (b"cbuiltins\nbytes\n](K\x01K\x02e\x85R.", b"\x01\x02"),
    "bytes of a text": (b"cbuiltins\nbytearray\nX\x01\x00\x00\x00a\x85R.", bytearray(b"a")),
}


@pytest.mark.parametrize(("content", "expected"), PLAIN.values(), ids=PLAIN)
def test_unusual_instructions_of_plain_data(content: bytes, expected: Any) -> None:
    value = load_pickle(io.BytesIO(content))
    assert value == expected
    assert type(value) is type(expected) or expected == {}


def test_items_of_a_stand_in_are_left_out() -> None:
    value = load_pickle(io.BytesIO(b"cmodule\nname\nK\x01K\x02sK\x03a."))
    assert type(value) is StandIn
    assert repr(value) == "<stand-in for module.name>"


def refuses(read: Callable[[Any], Any], file: io.BytesIO, reason: str) -> None:
    """Checks that a file is not read, for this reason, which the caller puts into a sentence."""
    with pytest.raises(CheckpointError, match=re.escape(reason)):
        read(file)


REFUSED = {
    "it holds the instruction EXT1": b"\x82\x01.",
    "it holds the instruction INST": b"(icollections\nCounter\n.",
    "a tuple lacks items": b"N\x86.",
    "it appends to a NoneType": b"NNa.",
    "it sets items of a int": b"K\x00K\x01K\x02s.",
    "it adds items to a list": b"](K\x01\x90.",
    "the name of a class is no string": b"K\x01K\x02\x93.",
    "it refers to a storage where there is none": b"K\x01Q.",
    "the arguments of a call are a int": COUNTER + b"K\x01R.",
    "it calls 1, which is not allowed": b"K\x01)R.",
    "the arguments of a class are a int": NAMESPACE + b"K\x01\x81.",
    "it creates an object of <class 'list'>": b"cbuiltins\nlist\n)\x81.",
    "it creates an object of 1,": b"K\x01)\x81.",
    "it sets the state of a list": b"]}b.",
    "the state of an object is no dictionary of names": NAMESPACE + b")\x81K\x01b.",
    "the items of a container are a int": b"cbuiltins\nset\nK\x05\x85R.",
    "a defaultdict has the factory 5": b"ccollections\ndefaultdict\nK\x05\x85R.",
    "the items of a deque are a int": b"ccollections\ndeque\nK\x05\x85R.",
    "bytes are encoded as 'rot13'": b"c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.",
    "the content of bytes is a int": b"cbuiltins\nbytes\nK\x05\x85R.",
    "'torch.float32' is no layout of tensors": (
        b"ctorch.serialization\n_get_layout\nX\x0d\x00\x00\x00torch.float32\x85R."
    ),
    "an array is of the class <class 'numpy.dtype'>": (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\ndtype\nK\x00\x85C\x01b\x87R."
    ),
    "a number of numpy is b'abc' of type 1": b"cnumpy.core.multiarray\nscalar\nK\x01C\x03abc\x86R.",
    "an array has the shape 1 and the type 2": RECONSTRUCTED + b"(K\x01K\x01K\x02\x89C\x00tb.",
}


@pytest.mark.parametrize(("reason", "content"), REFUSED.items(), ids=REFUSED)
def test_a_damaged_pickle_is_refused(reason: str, content: bytes) -> None:
    refuses(load_pickle, io.BytesIO(content), reason)


class Reduced:
    """Pickled as a call, and a state, of one's choice."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def times(*unit: Any) -> Any:
    """Return the call and the state of a type of times, whose unit is damaged."""
    return np.dtype, ("M8",), (4, "<", None, None, None, -1, -1, 0, ({}, unit))


def content_of(state: Any) -> Any:
    """Return the call and the state of an array."""
    function, arguments, _ = np.empty(0, "u1").__reduce__()[:3]
    return function, arguments, state


TYPE, UNIT, CONTENT = ("the type of an array", "the unit of an array of times", "the content of an array")
STATES = [
    (TYPE, (np.dtype, ("i4",), (3, "!", None, None, None, -1, -1, 0))),  # the order of bytes
    (TYPE, (np.dtype, ("i4",), (3, "<", None, ("a",), None, -1, -1, 0))),  # fields
    (UNIT, times(b"D", 0, 1, 1)),
    (UNIT, times(b"Q", 1, 1, 1)),
    (CONTENT, content_of((1, (2,), np.dtype("O"), 7, [1, 2]))),
    (CONTENT, content_of((1, (2,), np.dtype("O"), False, [1]))),
    (CONTENT, content_of((1, (1 << 40,), np.dtype("O"), False, []))),
    (CONTENT, content_of((1, (1,), np.dtype("O"), False, b"12345678"))),
    (CONTENT, content_of((1, (0,), np.dtype("O"), False, [1]))),
]


@pytest.mark.parametrize(("reason", "reduced"), STATES, ids=range(len(STATES)))
def test_a_damaged_array_is_refused(reason: str, reduced: Any) -> None:
    content = pickle.dumps(Reduced(*reduced))
    refuses(load_pickle, io.BytesIO(content), f"{reason} is damaged")


def list_of_storage(*identifier: Any) -> bytes:
    """Return the pickle of a list with a storage that is named by an identifier."""
    place = object()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return identifier if value is place else None

    file = io.BytesIO()
    Pickler(file, protocol=2).dump([place])
    return file.getvalue()


# Zip archives

WEIGHTS = torch.arange(6.0)


def members() -> dict[str, bytes]:
    """Return the members of an archive as torch writes it."""
    file = io.BytesIO()
    torch.save({"weights": WEIGHTS, "part": WEIGHTS[2:4]}, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archived(content: dict[str, bytes], **options: Any) -> io.BytesIO:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        for name, value in content.items():
            archive.writestr(name, value)
    file.seek(0)
    return file


def named(content: dict[str, bytes], ending: str) -> str:
    """Return the full name of a member."""
    (name,) = (name for name in content if name.endswith(ending))
    return name


def test_the_byte_order_of_an_archive_is_that_of_its_machine() -> None:
    content = members()
    del content[named(content, "byteorder")]
    assert torch.equal(read_archive(archived(content))["weights"], WEIGHTS)
    content = members()
    content[named(content, "byteorder")] = b"big"
    content[named(content, "data/0")] = WEIGHTS.numpy().astype(">f4").tobytes()
    assert torch.equal(read_archive(archived(content))["weights"], WEIGHTS)


Change = Callable[[dict[str, bytes]], Any]


def with_member(ending: str, value: bytes) -> Change:
    return lambda content: content.update({named(content, ending): value})


def without_member(ending: str) -> Change:
    return lambda content: content.pop(named(content, ending))


def with_constants(content: dict[str, bytes]) -> None:
    content[named(content, "data.pkl").replace("data.pkl", "constants.pkl")] = b"."


def storing(*identifier: Any) -> Change:
    """Return a change after which the pickle names a storage by an identifier."""
    return with_member("data.pkl", list_of_storage(*identifier))


CHANGES = {
    "it is a program of TorchScript": with_constants,
    "it holds no 'data.pkl'": without_member("data.pkl"),
    "it lacks": without_member("data/0"),
    "storage '0' has 20 bytes, not 6 elements of torch.float32": with_member("data/0", bytes(20)),
    "its byte order is 'middle'": with_member("byteorder", b"middle"),
    "it names a storage in a way that is not allowed": storing("file", torch.float32, "0", "cpu", 6),
    "it names a storage in a way that is not allowed: type": storing("storage", 5, "0", "cpu", 6),
    "it names a storage in a way that is not allowed: key": storing("storage", torch.float32, 0, "cpu", 6),
    "it names a storage in a way that is not allowed: count": storing("storage", torch.float32, "0", "cpu", 6.0),
}


@pytest.mark.parametrize(("reason", "change"), CHANGES.items(), ids=CHANGES)
def test_a_damaged_archive_is_refused(reason: str, change: Change) -> None:
    content = members()
    change(content)
    refuses(read_archive, archived(content), reason.partition(": ")[0])


@pytest.mark.parametrize(
    ("reason", "size"),
    [
        ("is not stored as torch stores it", 10),
        # A few bytes would become a gigabyte.
        ("its members are larger than it is itself", 1 << 20),
    ],
)
def test_a_compressed_archive_is_refused(reason: str, size: int) -> None:
    file = archived({**members(), "archive/zeros": bytes(size)}, compression=zipfile.ZIP_DEFLATED)
    refuses(read_archive, file, reason)


def test_two_members_of_one_name_are_refused() -> None:
    file = archived(members())
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(file, "a") as archive:
        archive.writestr(archive.namelist()[0], b".")
    refuses(read_archive, file, "it holds two members of one name")


@pytest.mark.parametrize("ending", ["data/0", "serialization_id"])
def test_a_check_sum_that_differs_is_found(ending: str) -> None:
    """Of a storage, and of a member that is not read otherwise."""
    whole = members()
    name = named(whole, ending)
    content = archived(whole).getvalue()
    damaged = content.replace(whole[name], bytes(len(whole[name])))
    assert damaged != content
    refuses(check_archive, io.BytesIO(damaged), f"'{name}' in it is not what was written")
    with pytest.raises(zipfile.BadZipFile, match=f"Bad CRC-32 for file '{name}'"):
        read_archive(io.BytesIO(damaged))
