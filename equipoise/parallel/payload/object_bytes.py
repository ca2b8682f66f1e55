"""Objects and errors as bytes, for other processes of this run, which may be on other machines."""

import io
from collections.abc import Sequence
from typing import Any

import cloudpickle

from equipoise.parallel.payload.authentication import opened, sealed
from equipoise.parallel.payload.object_pickling import Pickler, Unpickler

__all__ = ["dumps", "loads", "pickle_error"]


def dumps(value: Any, shared_objects: Sequence[Any] = ()) -> bytes:
    """Return an object and its tensors as bytes, for other processes of this run.

    Torch's own pickling cannot read all dtypes back.

    Args:
        value: The object.
        shared_objects: Objects that the reader has as well; the reader's objects replace them.

    Raises:
        Exception: The error of pickle, if a part of it cannot be pickled.
    """
    file = io.BytesIO()
    Pickler(file, None, shared_objects).dump(value)
    return sealed(file.getvalue())


def loads(content: bytes, shared_objects: Sequence[Any] = ()) -> Any:
    """Return the object of bytes that `dumps` returned.

    Args:
        content: The bytes.
        shared_objects: Objects of the reader that replace those of the writer, in the writer's order.

    Raises:
        WorkerError: If a process outside of this run has written the bytes.
    """
    return Unpickler(io.BytesIO(opened(content)), shared_objects, None).load()


def pickle_error(error: BaseException) -> bytes | None:
    """Return an error as bytes, as it is: pickle leaves out its traceback and causes, which a report holds as text.

    Returns:
        The bytes; None if the error cannot be pickled and unpickled.
    """
    try:
        pickled: bytes = cloudpickle.dumps(error)
        cloudpickle.loads(pickled)
    except Exception:
        return None
    return pickled
