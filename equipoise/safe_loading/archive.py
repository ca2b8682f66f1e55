"""Read files of `torch.save` without running anything in them.

A file is a zip archive: `data.pkl` describes the objects, and each storage of tensors is a member. Torch's own reader
would hand an archive with a program in it to TorchScript, and it neither compares check sums nor sizes.
"""

import io
import sys
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import torch

from equipoise.errors import CheckpointError
from equipoise.safe_loading.stand_in import StandIn
from equipoise.safe_loading.tensor_formats import Storage
from equipoise.safe_loading.unpickler import load_pickle

__all__ = ["OpenArchive", "check_archive", "is_archive", "read_archive"]

# Bytes that are read in one call.
_CHUNK = 1 << 20

# Bytes of a piece of a storage; a multiple of the size of any element.
_PIECE = 1 << 24

# The bit of a member's attributes that marks a folder; torch does not read the content of such a member.
_FOLDER_BIT = 0x10

_BAD_IDENTIFIER = "it names a storage in a way that is not allowed"


def is_archive(file: IO[bytes]) -> bool:
    """Return whether a file begins as a zip archive does; its position stays at the beginning."""
    beginning = file.read(4)
    file.seek(0)
    return beginning == b"PK\x03\x04"


# Zip archives


def read_archive(file: IO[bytes], *, values: bool = True) -> Any:
    """Return the content of a zip archive of torch, with all tensors on the CPU.

    Args:
        file: The archive.
        values: Whether to read the values of tensors. Default: True. False: all tensors are on the meta device.

    Raises:
        CheckpointError: If it is damaged; the message names the damage. Damage may raise other errors as well.
    """
    with zipfile.ZipFile(file) as archive:
        return _ArchiveReader(archive, _size_of(file), values=values).read()


class OpenArchive:
    """A zip archive of torch whose values are read piece by piece, so that a file of any size needs little memory.

    Args:
        file: The archive, which stays open while values are read.

    Raises:
        CheckpointError: If it is damaged.

    Attributes:
        content: The content, with all tensors on the meta device.
    """

    def __init__(self, file: IO[bytes]) -> None:
        archive = zipfile.ZipFile(file)
        self._reader = _ArchiveReader(archive, _size_of(file), values=False)
        self.content: Any = self._reader.read()
        # Torch returns the same object for a storage as long as anything refers to it.
        self._keys = {id(storage): key for key, storage in self._reader.storages.items()}
        # The key of the storage that was read last, and the storage.
        self._last_key: str | None = None
        self._last_storage: torch.UntypedStorage | None = None

    def pieces_of(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the values of a tensor of the content, in order: flat pieces of at most 16 MiB, on the CPU.

        A tensor that shares its storage, or is not contiguous, comes as a whole.

        Args:
            tensor: The tensor on the meta device.

        Raises:
            CheckpointError: If it has no values in the archive.
            zipfile.BadZipFile: If they are damaged, which the last piece shows.
        """
        storage = tensor.untyped_storage()
        key = self._keys.get(id(storage))
        if key is None:
            raise CheckpointError(f"a tensor of shape {tuple(tensor.shape)} in it has no values of its own")
        fills_storage = tensor.is_contiguous() and tensor.nbytes == storage.nbytes()
        if not fills_storage or tensor.is_conj() or self._reader.is_foreign_byte_order:
            yield self._whole(tensor, key).resolve_conj().reshape(-1)
            return
        with self._reader.open_storage(key) as member:
            while content := member.read(_PIECE):
                yield _tensor_of(content, tensor.dtype)

    def _whole(self, tensor: torch.Tensor, key: str) -> torch.Tensor:
        """Return a tensor with its values."""
        storage = self._storage(key, tensor.dtype)
        value = torch.empty(0, dtype=tensor.dtype, device="cpu")
        value.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            return value.conj()
        return value

    def _storage(self, key: str, dtype: torch.dtype) -> torch.UntypedStorage:
        """Return a storage with its values. It is kept until another one is read, as it may hold several tensors."""
        if self._last_storage is None or self._last_key != key:
            # It is released before the next one is read, so that never two are in memory.
            self._last_storage = None
            self._last_storage = self._reader.load_storage(key, dtype)
            self._last_key = key
        return self._last_storage


def _tensor_of(content: bytes, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as a flat tensor."""
    # A tensor needs memory that can be written.
    memory = bytearray(content)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


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
        values: Whether to read the content of storages. Default: True.
    """

    def __init__(self, archive: zipfile.ZipFile, size: int, *, values: bool = True) -> None:
        self.archive = archive
        self.reads_values = values
        self.storages: dict[str, torch.UntypedStorage] = {}
        self.members = {member.filename: member for member in archive.infolist()}
        self._check_members(size)
        self.folder = self._find_folder()
        if f"{self.folder}constants.pkl" in self.members:
            raise CheckpointError("it is a program of TorchScript")
        self.is_foreign_byte_order = self._byte_order() != sys.byteorder

    def _check_members(self, size: int) -> None:
        """Refuse an archive that is not as torch writes it."""
        members = self.archive.infolist()
        if len(self.members) != len(members):
            raise CheckpointError("it holds two members of one name")
        total = sum(member.file_size for member in members)
        if total > size:
            raise CheckpointError("its members are larger than it is itself")
        for member in members:
            is_compressed = member.compress_type != zipfile.ZIP_STORED
            is_folder = member.external_attr & _FOLDER_BIT
            if is_compressed or is_folder:
                raise CheckpointError(f"{member.filename!r} in it is not stored as torch stores it")

    def _find_folder(self) -> str:
        """Return the folder that holds all members, with a slash at its end."""
        pickles = [name for name in self.members if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise CheckpointError("it holds no 'data.pkl'")
        return pickles[0].removesuffix("data.pkl")

    def read(self) -> Any:
        """Return the object that the archive holds."""
        content = self.archive.read(f"{self.folder}data.pkl")
        value = load_pickle(io.BytesIO(content), self._find_storage)
        self._check_rest()
        return value

    def _byte_order(self) -> str:
        name = f"{self.folder}byteorder"
        # Older versions of torch write no byte order.
        if name not in self.members:
            return "little"
        order = self.archive.read(name).decode()
        if order not in ("little", "big"):
            raise CheckpointError(f"its byte order is {order!r}")
        return order

    def _find_storage(self, identifier: Any) -> Storage | StandIn:
        """Return the storage that a pickle names by kind, type, key, device and number of elements."""
        # 1. Check the identifier.
        kind, dtype, key, _, count = identifier
        if kind != "storage":
            raise CheckpointError(_BAD_IDENTIFIER)
        if isinstance(dtype, StandIn):
            # The storage of a quantised tensor.
            return dtype
        # No instances of other classes, which would bring methods of their own.
        is_valid = isinstance(dtype, torch.dtype) and type(key) is str and type(count) is int
        if not is_valid:
            raise CheckpointError(_BAD_IDENTIFIER)

        # 2. Read the storage, unless an earlier tensor shares it.
        storage = self.storages.get(key)
        if storage is None:
            storage = self._read_storage(key, dtype)
            self.storages[key] = storage

        # 3. Compare the sizes.
        size = storage.nbytes()
        if size != count * dtype.itemsize:
            raise CheckpointError(f"storage {key!r} has {size} bytes, not {count} elements of {dtype}")
        return Storage(storage, dtype)

    def _read_storage(self, key: str, dtype: torch.dtype) -> torch.UntypedStorage:
        name = f"{self.folder}data/{key}"
        if name not in self.members:
            raise CheckpointError(f"it lacks {name!r}")
        if not self.reads_values:
            size = self.members[name].file_size
            return torch.UntypedStorage(size, device="meta")  # type: ignore[no-untyped-call]
        return self.load_storage(key, dtype)

    def open_storage(self, key: str) -> IO[bytes]:
        """Open the bytes of a storage; the check sum is compared at their end."""
        return self.archive.open(f"{self.folder}data/{key}")

    def load_storage(self, key: str, dtype: torch.dtype) -> torch.UntypedStorage:
        """Return a storage with its values."""
        name = f"{self.folder}data/{key}"
        # The program may have set another device as torch's default.
        content = torch.empty(self.members[name].file_size, dtype=torch.uint8, device="cpu")
        with self.open_storage(key) as member:
            _fill(content, member)
        storage = content.untyped_storage()
        if self.is_foreign_byte_order:
            storage.byteswap(dtype)  # type: ignore[no-untyped-call]
        return storage

    def _check_rest(self) -> None:
        """Compare the check sums of the members that are not read as storages."""
        for name in self.members:
            key = name.removeprefix(f"{self.folder}data/")
            if key not in self.storages:
                # `zipfile` compares the check sum of a member when it reads it.
                self.archive.read(name)


def _fill(content: torch.Tensor, file: Any) -> None:
    """Fill a tensor of bytes from a file.

    Raises:
        CheckpointError: If the file ends before.
    """
    rest = memoryview(content.numpy())  # type: ignore[arg-type]
    while rest:
        count = file.readinto(rest[:_CHUNK])
        if not count:
            raise CheckpointError("it is truncated")
        rest = rest[count:]
