"""Defects of a checkpoint file: code where data belongs, damage, and values of other types.

Each function yields names and contents of files. A payload tries to create the file CANARY, in one of the ways in which
a pickle can call something.
"""

import copy
import io
import pickle
import pickletools
import random
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["damaged_pickles", "damages", "mutations", "payloads", "positions", "replaced_pickles", "with_pickle"]

Attack = tuple[str, bytes]

_SHELL = (
    ("os", "system"),
    ("posix", "system"),
    ("subprocess", "getoutput"),
    ("torch.utils.collect_env", "run"),
    ("os", "popen"),
)
_PYTHON = (
    ("builtins", "eval"),
    ("__builtin__", "exec"),
    ("code", "compile_command"),
    ("timeit", "timeit"),
    ("torch._dynamo.guards", "eval"),
)
_WITH_A_PATH = (
    ("pathlib", "Path.touch"),
    ("shutil", "rmtree"),
    ("os", "mkdir"),
    ("os", "makedirs"),
    ("torch.jit", "load"),
    ("torch", "load"),
    ("torch.hub", "load"),
    ("importlib", "import_module"),
    ("builtins", "__import__"),
    ("runpy", "run_path"),
    ("lightning.fabric.utilities.cloud_io", "get_filesystem"),
    ("equipoise.safe_loading.stand_in_search", "stand_ins_in"),
    ("torch._utils", "_rebuild_qtensor"),
)


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


# An array that has no state yet.
_ARRAY = _global("numpy.core.multiarray", "_reconstruct") + _global("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"


def payloads(canary: str) -> list[Attack]:
    """Return fragments of a pickle that leave one object on the stack.

    Args:
        canary: The path that no fragment may create.
    """
    command = _text(f"touch {canary}")
    python = _text(f"open({canary!r}, 'w').close()")
    calls = [(one, command) for one in _SHELL] + [(one, python) for one in _PYTHON]
    calls += [(one, _text(canary)) for one in _WITH_A_PATH] + [(("builtins", "open"), _text(canary) + _text("w"))]
    found: list[Attack] = []
    for (module, name), arguments in calls:
        full = f"{module}.{name}"
        inst = f"i{module}\n{name}\n".encode()
        stacked = _text(module) + _text(name) + b"\x93"
        found += [
            (f"REDUCE {full}", _global(module, name) + b"(" + arguments + b"tR"),
            (f"STACK_GLOBAL {full}", stacked + b"(" + arguments + b"tR"),
            (f"INST {full}", b"(" + arguments + inst),
            (f"OBJ {full}", b"(" + _global(module, name) + arguments + b"o"),
            (f"NEWOBJ {full}", _global(module, name) + b"(" + arguments + b"t\x81"),
            (f"NEWOBJ_EX {full}", _global(module, name) + b"(" + arguments + b"t}\x92"),
        ]
    return found + _states(command) + _indirect(canary, command, python) + _of_memory()


def _states(command: bytes) -> list[Attack]:
    """Return fragments that set states of objects, classes and functions."""
    system = _global("os", "system")
    setter = b"}" + _text("__setstate__") + system + b"s"
    slots = b"N}" + _text("__add__") + system + b"s\x86"
    targets = {
        "OrderedDict": _global("collections", "OrderedDict") + b")R",
        "Namespace": _global("argparse", "Namespace") + b")\x81",
        "class": _global("torch", "Tensor"),
        "function": _global("torch._utils", "_rebuild_tensor_v2"),
        "dtype": _global("torch", "float32"),
        "set": _global("builtins", "set") + b")R",
        "path": _global("pathlib", "PosixPath") + b")R",
        "tensor": _global("torch._utils", "_rebuild_meta_tensor_no_storage")
        + b"("
        + _global("torch", "float32")
        + b"K\x03\x85K\x01\x85\x89tR",
        "array": _ARRAY,
        "DictConfig": _global("omegaconf.dictconfig", "DictConfig") + b")\x81",
        "Metadata": _global("omegaconf.base", "Metadata") + b")\x81",
        "dict": b"}",
        "text": _text("x"),
    }
    found = []
    for name, target in targets.items():
        found.append((f"BUILD {name}", target + setter + b"b" + command + b"b"))
        found.append((f"BUILD slots of {name}", target + slots + b"b"))
    return found


def _indirect(canary: str, command: bytes, python: bytes) -> list[Attack]:
    """Return fragments in which something harmless would call something else."""
    nested = pickle.dumps({"x": 1}, 2)[:-1] + _global("os", "system") + b"(" + command + b"tR."
    inner = b"C" + bytes([min(len(nested), 255)]) + nested[:255]
    default = _global("collections", "defaultdict") + b"("
    storage = b"(" + _text("storage") + _global("torch", "FloatStorage")
    lookup = _global("builtins", "getattr") + b"(" + _global("os", "path") + _text("os") + b"tR"
    return [
        ("nested pickle of torch", _global("torch.storage", "_load_from_bytes") + b"(" + inner + b"tR"),
        ("nested pickle", _global("pickle", "loads") + b"(" + inner + b"tR"),
        ("getattr", lookup + b"(" + command + b"tR"),
        ("partial", _global("functools", "partial") + b"(" + _global("os", "system") + command + b"tR)R"),
        ("map", _global("builtins", "map") + b"(" + _global("os", "system") + b"]" + command + b"atR"),
        ("reconstructor", _global("copyreg", "_reconstructor") + b"(" + _global("os", "system") + command + b"NtR"),
        (
            "defaultdict",
            _global("collections", "defaultdict") + b"(" + _global("builtins", "eval") + b"tR" + python + b"Ns",
        ),
        ("factory", default + _global("torch._utils", "_rebuild_tensor") + b"tR"),
        ("call of a number", b"K\x01(" + command + b"tR"),
        ("call of a text", _text("eval") + b"(" + python + b"tR"),
        ("call of a class of tensors", _global("torch", "Tensor") + b"(K\x05tR"),
        (
            "function of a tensor",
            _global("torch._tensor", "_rebuild_from_type_v2")
            + b"("
            + _global("builtins", "eval")
            + _global("torch", "Tensor")
            + b"("
            + python
            + b"tNtR",
        ),
        (
            "checked function of a tensor",
            _global("torch._tensor", "_rebuild_from_type_v2")
            + b"("
            + _global("_codecs", "encode")
            + _global("torch", "Tensor")
            + b"("
            + python
            + b"tNtR",
        ),
        ("extension", b"\x82\x01"),
        ("persistent module", b"(" + _text("module") + _global("os", "system") + command + command + b"tQ"),
        ("persistent name", b"Pos.system\n"),
        (
            "storage of another file",
            storage + _text(canary) + _text("cpu") + b"K\x01tQ",
        ),
    ]


def _of_memory() -> list[Attack]:
    """Return fragments that would take memory or time without end."""
    number = b"\x8a\x06" + (10**13).to_bytes(6, "little")
    tuples = b"K\x01" + b"q\xfah\xfa\x86" * 60 + b"q\xfb0"
    storage = b"(" + _text("storage") + _global("torch", "FloatStorage") + _text("0") + _text("cpu") + number + b"tQ"
    objects = _global("numpy", "dtype") + _text("O") + b"\x89\x88\x87R"
    return [
        ("large bytearray", _global("builtins", "bytearray") + b"(" + number + b"tR"),
        ("large bytes", _global("builtins", "bytes") + b"(" + number + b"tR"),
        ("large storage", storage),
        ("large text", b"X\xff\xff\xff\x7fabc"),
        ("large number", b"\x8b\xff\xff\xff\x7fabc"),
        ("nested key", tuples + b"}h\xfbNs"),
        ("nested item of a set", tuples + _global("builtins", "set") + b"(]h\xfbatR"),
        ("nested item that is added to a set", tuples + b"\x8f(h\xfb\x90"),
        ("nested item of a frozen set", tuples + b"(h\xfb\x91"),
        ("key of 400,000 levels", b"})" + b"\x85" * 400_000 + b"Ns"),
        ("large array", _global("numpy", "ndarray") + b"(" + number + b"\x85tR"),
        ("array with fewer objects than its shape says", _ARRAY + b"(K\x01M\xe8\x03\x85" + objects + b"\x89]tb"),
    ]


# Where


def _pickle_of(content: bytes) -> tuple[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return name, archive.read(name)


def with_pickle(content: bytes, data: bytes) -> bytes:
    """Return a checkpoint with another pickle, and with the right check sums."""
    name, _ = _pickle_of(content)
    return _rewritten(content, {name: data})


def _rewritten(content: bytes, changed: dict[str, bytes | None], twice: tuple[str, ...] = ()) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(target, "w") as copy:
        for member in archive.infolist():
            data = changed.get(member.filename, archive.read(member))
            if data is not None:
                copy.writestr(member.filename, data)
            if member.filename in twice:
                copy.writestr(member.filename, data or b"")
    return target.getvalue()


def positions(content: bytes, canary: str, rng: random.Random) -> Iterator[Attack]:
    """Yield a file for each place between two instructions of the pickle, with a payload there."""
    _, data = _pickle_of(content)
    fragments = payloads(canary)
    rng.shuffle(fragments)
    places = [position for _, _, position in pickletools.genops(data) if position is not None and position > 0]
    for index, place in enumerate(places):
        name, fragment = fragments[index % len(fragments)]
        ending = (b"0", b"")[index % 2]  # taken from the stack again, or left on it
        yield f"{name} at {place}", with_pickle(content, data[:place] + fragment + ending + data[place:])


def replaced_pickles(content: bytes, canary: str) -> Iterator[Attack]:
    """Yield files whose whole pickle is a payload, in an archive and alone."""
    for name, fragment in payloads(canary):
        yield f"{name} instead", with_pickle(content, b"\x80\x02" + fragment + b".")
        state = b"\x80\x02}(" + _text("state_dict") + b"}" + _text("extra") + fragment + b"u."
        yield f"{name} beside the weights", with_pickle(content, state)
        yield f"{name} as the file", b"\x80\x02" + fragment + b"."


# Damage


def damages(content: bytes, count: int, rng: random.Random) -> Iterator[Attack]:
    """Yield files with damaged bits, cuts, holes, and members that are missing, empty or there twice."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = archive.namelist()
    kinds: list[tuple[str, Callable[[], bytes]]] = [
        ("bit", lambda: _flipped(content, rng)),
        ("bytes", lambda: _overwritten(content, rng)),
        ("cut", lambda: content[: rng.randrange(len(content))]),
        ("hole", lambda: _with_hole(content, rng)),
        ("removed member", lambda: _rewritten(content, {rng.choice(members): None})),
        ("doubled member", lambda: _doubled(content, rng.choice(members))),
        ("empty member", lambda: _rewritten(content, {rng.choice(members): b""})),
    ]
    for index in range(count):
        kind, make = kinds[index % len(kinds)]
        yield f"{kind} {index}", make()


def damaged_pickles(content: bytes, count: int, rng: random.Random) -> Iterator[Attack]:
    """Yield files whose pickle is damaged while all check sums are right."""
    _, data = _pickle_of(content)
    kinds: list[tuple[str, Callable[[], bytes]]] = [
        ("bit", lambda: _flipped(data, rng)),
        ("bytes", lambda: _overwritten(data, rng)),
        ("cut", lambda: data[: rng.randrange(len(data))]),
        ("hole", lambda: _with_hole(data, rng)),
    ]
    for index in range(count):
        kind, make = kinds[index % len(kinds)]
        yield f"{kind} of the pickle {index}", with_pickle(content, make())


def _flipped(content: bytes, rng: random.Random) -> bytes:
    changed = bytearray(content)
    changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwritten(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    piece = rng.randbytes(rng.randrange(1, 64))
    return content[:start] + piece + content[start + len(piece) :]


def _with_hole(content: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(content))
    return content[:start] + content[start + rng.randrange(1, 200) :]


def _doubled(content: bytes, name: str) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _rewritten(content, {}, (name,))


# Other types and values

_OTHERS: tuple[Any, ...] = ("x", None, -1, 10**30, 1.5, float("nan"), [], {}, (1, "x"), torch.ones(2), True, b"x")


def mutations(checkpoint: dict[str, Any], count: int, rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield copies of a checkpoint in which one value has another type or size, with where."""
    places = list(_places(checkpoint))
    for _ in range(count):
        path = rng.choice(places)
        mutated = copy.deepcopy(checkpoint)
        holder: Any = mutated
        for key in path[:-1]:
            holder = holder[key]
        other = rng.choice(_OTHERS)
        if isinstance(holder, tuple):
            continue
        holder[path[-1]] = copy.deepcopy(other)
        shown = "".join(f"[{key!r}]" for key in path)
        yield f"{shown} = {type(other).__name__}", mutated


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from _places(child, (*path, key))
