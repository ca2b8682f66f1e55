"""Objects that hooks had made, and that a resumed run lacks."""

from collections.abc import Iterator, Mapping
from io import IOBase
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from equipoise.notices import rank_zero_warn
from equipoise.parallel.snapshot.plain.copies import copied
from equipoise.parallel.snapshot.plain.leaves import Leaves
from equipoise.parallel.snapshot.plain.paths import Root, steps_from
from equipoise.parallel.snapshot.plain.places import text_of
from equipoise.parallel.snapshot.plain.restoring import differing
from equipoise.parallel.snapshot.plain.state import PlainState, State
from equipoise.parallel.snapshot.plain.values import LARGEST

if TYPE_CHECKING:
    from equipoise.trainer.hooks.hooks import Hooks
    from equipoise.trainer.state.run_state import RunState

__all__ = ["begin_again", "warn_of_hidden", "warn_of_lacking"]

_MOST_LISTED = 5


def begin_again(
    run_state: "RunState", hooks: "Hooks", roots: Mapping[str, Root], changes: State, plain_state: PlainState
) -> None:
    """Call `on_train_epoch_start` of those whose objects lack. Weights, buffers and options of optimisers stay.

    Args:
        run_state: The callbacks and optimisers of the run.
        hooks: Its hooks.
        roots: Its objects.
        changes: The changes of the run that it resumes.
        plain_state: Its state when it began.
    """
    module = hooks.module
    owners = {id(roots[name].value) for name, _ in differing(roots, changes, plain_state)}
    if not owners:
        return
    parts = set(map(id, module.modules()))
    tensors = {name: copied(tensor) for name, tensor in _tensors_of(module).items()}
    groups = [group for optimizer in run_state.optimizers for group in optimizer.param_groups]
    options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    for owner in (*run_state.callbacks, module):
        if id(owner) in owners or (owner is module and owners & parts):
            hooks.call_of("on_train_epoch_start", owner)
    with torch.no_grad():
        # A layer that the hook has replaced gets the weights of the one in its place.
        for name, tensor in _tensors_of(module).items():
            if name in tensors and tensors[name].shape == tensor.shape:
                tensor.copy_(tensors[name])
    for group, values in zip(groups, options, strict=True):
        group.update(values)


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def warn_of_lacking(roots: Mapping[str, Root], changes: State, plain_state: PlainState) -> None:
    """Warn of what still lacks; `begin_again` describes the arguments."""
    listed = [place for name, place in differing(roots, changes, plain_state) if not roots[name].objects_only]
    if listed:
        more = " and others" if len(listed) > _MOST_LISTED else ""
        rank_zero_warn(
            f"The resumed run lacks what the checkpoint cannot hold: {', '.join(listed[:_MOST_LISTED])}{more} had"
            " been set by hooks or steps, after the hooks of the start. A file holds numbers, texts, tensors and"
            f" containers of them, up to {LARGEST >> 20} MiB each. Create such objects in `on_train_start` or"
            " `on_train_epoch_start`, register large tensors as buffers, or save them in `on_save_checkpoint`."
        )


def warn_of_hidden(run_state: "RunState", roots: Mapping[str, Root], made_before: PlainState | None) -> None:
    """Warn of iterators and further optimisers, whose state no attribute shows.

    Args:
        run_state: The optimisers of the run, which a checkpoint holds.
        roots: The module and the callbacks, by their names.
        made_before: The state when the run began. Later objects are those of a new epoch; None: the epoch is resumed.
    """
    leaves = [leaf for leaf in Leaves().of(roots) if leaf.kind == "objects" and not roots[leaf.path[0]].objects_only]
    hidden = [
        f"{text_of(leaf.path)} ({type(leaf.value).__name__})"
        for leaf in leaves
        if _is_hidden(leaf.value)
        and not any(leaf.value is optimizer for optimizer in run_state.optimizers)
        and (made_before is None or made_before.has_noted(list(leaf.path), leaf.value))
    ]
    if hidden:
        rank_zero_warn(
            f"The resumed run has {', '.join(hidden[:_MOST_LISTED])} as made anew: a checkpoint holds no position of an"
            " iterator, and no state of an optimiser that `configure_optimizers` has not returned. Save and restore it"
            " in `on_save_checkpoint` and `on_load_checkpoint`."
        )


def _is_hidden(value: Any) -> bool:
    if isinstance(value, Optimizer):
        return True
    return isinstance(value, Iterator) and not isinstance(value, IOBase | count) and steps_from(value) is None
