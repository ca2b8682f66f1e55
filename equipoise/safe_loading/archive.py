"""Read files of `torch.save`, in both of its formats, without running anything in them.

The format of today is a zip archive: `data.pkl` describes the objects, and each storage of tensors is a member. The
format of before torch 1.6 is a sequence of pickles, then the storages. Torch's own reader would hand an archive with a
program in it to TorchScript, and it neither compares check sums nor sizes.
"""

import io
import struct
import sys
import zipfile
from typing import IO, Any

import torch

from equipoise.errors import CheckpointError
from equipoise.safe_loading.stand_in import StandIn
from equipoise.safe_loading.tensor_formats import Storage
from equipoise.safe_loading.unpickler import load_pickle

__all__ = ["check_archive", "is_archive", "read_archive", "read_legacy"]

_CHUNK = 1 << 20  # bytes that are read at once
_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001


def is_archive(file: IO[bytes]) -> bool:
    """Return whether a file begins as a zip archive does; its position stays at the beginning."""
    beginning = file.read(4)
    file.seek(0)
    return beginning == b"PK\x03\x04"


# Zip archives


def read_archive(file: IO[bytes]) -> Any:
    """Return what a zip archive of torch holds, with all tensors on the CPU.

    Args:
        file: The archive.

    Raises:
        CheckpointError: If it is damaged, with what is wrong. Damage may raise other errors as well.
    """
    with zipfile.ZipFile(file) as archive:
        reader = _ArchiveReader(archive, _size_of(file))
        return reader.read()


def check_archive(file: IO[bytes]) -> None:
    """Compare the check sums of an archive that torch is about to read.

    Raises:
        CheckpointError: If it is damaged.
    """
    with zipfile.ZipFile(file) as archive:
        _ArchiveReader(archive, _size_of(file))
        damaged = archive.testzip()
    if damaged is not None:
        raise CheckpointError(f"{damaged!r} in it is not what was written")


def _size_of(file: IO[bytes]) -> int:
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    return size


class _ArchiveReader:
    """The members of an archive, and the storages that were read from them.

    Args:
        archive: The archive.
        size: Its size in bytes; the members cannot be larger than it, as nothing in it is compressed.
    """

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self.archive = archive
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.members = {member.filename: member for member in archive.infolist()}
        if len(self.members) != len(archive.infolist()):
            raise CheckpointError("it holds two members of one name")
        if sum(member.file_size for member in archive.infolist()) > size:
            raise CheckpointError("its members are larger than it is itself")
        folder_bit = 0x10  # torch does not read the content of a member that is marked as a folder
        for name, member in self.members.items():
            if member.compress_type != zipfile.ZIP_STORED or member.external_attr & folder_bit:
                raise CheckpointError(f"{name!r} in it is not stored as torch stores it")
        pickles = [name for name in self.members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError("it holds no 'data.pkl'")
        self.folder = pickles[0].removesuffix("data.pkl")
        if f"{self.folder}constants.pkl" in self.members:
            raise CheckpointError("it is a program of TorchScript")
        self.foreign_byte_order = self._byte_order() != sys.byteorder

    def read(self) -> Any:
        """Return what the archive holds."""
        content = self.archive.read(f"{self.folder}data.pkl")
        value = load_pickle(io.BytesIO(content), self._storage)
        self._check_rest()
        return value

    def _byte_order(self) -> str:
        if f"{self.folder}byteorder" not in self.members:
            return "little"
        order = self.archive.read(f"{self.folder}byteorder").decode()
        if order not in ("little", "big"):
            raise CheckpointError(f"its byte order is {order!r}")
        return order

    def _storage(self, identifier: Any) -> Storage | StandIn:
        """Return the storage that a pickle names by kind, type, key, device and number of elements."""
        kind, dtype, key, _, count = identifier
        if kind == "storage" and isinstance(dtype, StandIn):
            return dtype  # of quantised tensors
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str or type(count) is not int:
            raise CheckpointError("it names a storage in a way that is not allowed")
        if key not in self.storages:
            self.storages[key] = self._read_storage(key, dtype)
        storage = self.storages[key]
        if storage.nbytes() != count * dtype.itemsize:
            raise CheckpointError(f"storage {key!r} has {storage.nbytes()} bytes, not {count} elements of {dtype}")
        return Storage(storage, dtype)

    def _read_storage(self, key: str, dtype: torch.dtype) -> torch.UntypedStorage:
        name = f"{self.folder}data/{key}"
        if name not in self.members:
            raise CheckpointError(f"it lacks {name!r}")
        content = torch.empty(self.members[name].file_size, dtype=torch.uint8)
        with self.archive.open(name) as member:
            _fill(content, member)
        storage = content.untyped_storage()
        if self.foreign_byte_order:
            storage.byteswap(dtype)  # type: ignore[no-untyped-call]
        return storage

    def _check_rest(self) -> None:
        """Compare the check sums of the members that nothing has read."""
        for name in self.members:
            if name.removeprefix(f"{self.folder}data/") not in self.storages:
                self.archive.read(name)


def _fill(content: torch.Tensor, file: Any) -> None:
    """Fill a tensor of bytes from a file.

    Raises:
        CheckpointError: If the file ends before.
    """
    buffer = bytearray(min(_CHUNK, max(len(content), 1)))
    window = torch.frombuffer(buffer, dtype=torch.uint8)
    start = 0
    while start < len(content):
        count = file.readinto(memoryview(buffer)[: len(content) - start])
        if not count:
            raise CheckpointError("it is truncated")
        content[start : start + count] = window[:count]
        start += count


# The format of before torch 1.6


def read_legacy(file: IO[bytes]) -> Any:
    """Return what a file in the format of before torch 1.6 holds, with all tensors on the CPU.

    Args:
        file: The file, whose position is its beginning.

    Raises:
        CheckpointError: If it is none, or is damaged. Damage may raise other errors as well.
    """
    if load_pickle(file) != _MAGIC_NUMBER or load_pickle(file) != _LEGACY_VERSION:
        raise CheckpointError("it is no file of torch")
    load_pickle(file)  # facts about the machine that wrote it
    storages = _LegacyStorages(_size_of_rest(file))
    value = load_pickle(file, storages.find)
    storages.read(file, load_pickle(file))
    return value


def _size_of_rest(file: IO[bytes]) -> int:
    position = file.tell()
    size = file.seek(0, io.SEEK_END) - position
    file.seek(position)
    return size


class _LegacyStorages:
    """The storages of a file, which are filled after the objects that use them were built.

    Args:
        size: The bytes that remain in the file: no storage can be larger.
    """

    def __init__(self, size: int) -> None:
        self.bytes_left = size
        self.storages: dict[str, Storage] = {}

    def find(self, identifier: Any) -> Storage | StandIn:
        """Return the storage that a pickle names by kind, type, key, device, number of elements and view."""
        kind, *rest = identifier
        if kind == "module" and isinstance(rest[0], StandIn):
            return rest[0]  # classes of modules are named in this way, together with their source code
        if kind != "storage" or len(rest) != 5:
            raise CheckpointError("it names a storage in a way that is not allowed")
        dtype, key, _, count, view = rest
        if not isinstance(dtype, torch.dtype) or type(count) is not int or count < 0:
            raise CheckpointError("it names a storage in a way that is not allowed")
        if key not in self.storages:
            self.bytes_left -= count * dtype.itemsize
            if self.bytes_left < 0:
                raise CheckpointError("its storages are larger than it is itself")
            content = torch.zeros(count * dtype.itemsize, dtype=torch.uint8)
            self.storages[key] = Storage(content.untyped_storage(), dtype)
        if view is None:
            return self.storages[key]
        return self._part(self.storages[key], *view)

    def _part(self, whole: Storage, _: Any, start: int, count: int) -> Storage:
        size = whole.dtype.itemsize
        if type(start) is not int or type(count) is not int or not 0 <= start <= start + count:
            raise CheckpointError("a part of a storage is damaged")
        if (start + count) * size > whole.untyped.nbytes():
            raise CheckpointError("a part of a storage is larger than the storage")
        return Storage(whole.untyped[start * size : (start + count) * size], whole.dtype)

    def read(self, file: IO[bytes], keys: Any) -> None:
        """Fill the storages from the rest of the file, in the order of their keys."""
        if set(keys) != set(self.storages):
            raise CheckpointError("its storages are not those that its objects use")
        for key in keys:
            storage = self.storages[key]
            content = torch.empty(0, dtype=torch.uint8).set_(storage.untyped)
            (count,) = struct.unpack("<q", file.read(8))
            if count * storage.dtype.itemsize != len(content):
                raise CheckpointError(f"storage {key!r} has {count} elements, which is not what its tensors use")
            _fill(content, file)
