"""Weights that checkpoints leave out, since a callback says that the module has them anyway, such as a base model's."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from equipoise.callbacks.callback import Callback
from equipoise.errors import CheckpointError

__all__ = ["completed", "leaving_out", "names_left_out"]


def names_left_out(callbacks: Iterable[Any]) -> set[str]:
    """Return the names of the weights that callbacks leave out of checkpoints.

    Args:
        callbacks: Callbacks of Lightning or ours.
    """
    names: set[str] = set()
    for callback in callbacks:
        if isinstance(callback, Callback):
            names.update(callback.left_out_of_checkpoints)
    return names


@contextmanager
def leaving_out(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Leave weights that are frozen out of the states that the module returns meanwhile, before any are gathered.

    Args:
        module: The module.
        names: The names of the weights in its state.
    """

    def drop(_: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name, parameter in module.named_parameters(remove_duplicate=False):
            # A weight that is trained has other values than the base model.
            if name in names and not parameter.requires_grad:
                state.pop(prefix + name, None)

    handle = module.register_state_dict_post_hook(drop)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()


def completed(state: dict[str, Any], module: nn.Module, callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return a state with the module's own values for weights that it leaves out.

    Weights that it holds may differ from the base model's, so callbacks leave them out no longer.

    Args:
        state: The state of a checkpoint.
        module: The module.
        callbacks: Callbacks of Lightning or ours.

    Raises:
        CheckpointError: If it has floats for a weight that is stored as integers here, which would round them.
    """
    names = names_left_out(callbacks)
    if not names:
        return state
    present = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in names:
            continue
        present[name] = parameter
        loaded = state.get(name)
        if loaded is None:
            continue
        if loaded.is_floating_point() and not parameter.is_floating_point():
            raise CheckpointError(
                f"The checkpoint holds {name} as {loaded.dtype}, but here it is stored in few bits. The run that wrote"
                " it had whole weights, so continue without quantisation, or load its adapters alone."
            )
    for callback in callbacks:
        if getattr(callback, "left_out_of_checkpoints", ()):
            callback.left_out_of_checkpoints -= state.keys()
    return {**present, **state}
