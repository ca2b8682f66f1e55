"""Names of weights in a checkpoint and in the present module, which may be compiled with other parts than then."""

from collections.abc import Collection, Iterable
from itertools import accumulate
from typing import Any

from equipoise.interop.torch.modules import uncompiled_name

__all__ = ["parts_without_weights", "with_present_names"]


def with_present_names(state: dict[str, Any], present: Iterable[str]) -> dict[str, Any]:
    """Return a state by the names of the present module; the state itself if they are the same.

    Names differ where a part was compiled with `torch.compile` then and is not now, or the other way round.

    Args:
        state: A state by names of then.
        present: The names of the present module. Names that it has not are kept.

    Example:
        >>> with_present_names({"net._orig_mod.bias": 1}, ["net.bias"])
        {'net.bias': 1}
    """
    names = {uncompiled_name(name): name for name in present}
    renamed = {names.get(uncompiled_name(name), name): value for name, value in state.items()}
    # Two names of then may mean one now: what fits as it is stays.
    if len(renamed) < len(state) or renamed.keys() == state.keys():
        return state
    return renamed


def parts_without_weights(missing: Collection[str], expected: Iterable[str]) -> list[str]:
    """Return the outermost submodules none of whose weights are in a checkpoint.

    Args:
        missing: The names that the checkpoint lacks.
        expected: All names of the module's state.

    Example:
        >>> parts_without_weights(["net.0.weight", "net.0.bias"], ["net.0.weight", "net.0.bias", "net.1.weight"])
        ['net.0']
    """
    # 1. The parts that have a weight.
    loaded = set()
    for name in set(expected).difference(missing):
        loaded.update(_parts_of(name))

    # 2. The outermost of all others, each once.
    outermost: dict[str, None] = {}
    for name in missing:
        for part in _parts_of(name):
            if part not in loaded:
                outermost[part] = None
                break
    return list(outermost)


def _parts_of(name: str) -> list[str]:
    """Return the submodules in which a weight lies, the outermost first."""
    *parents, _ = name.split(".")
    return list(accumulate(parents, "{}.{}".format))
