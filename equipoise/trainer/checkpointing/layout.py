"""Check the layout of a checkpoint before any part of it is used.

A file can be whole and yet hold a text where a counter belongs, written by another program or by hand. The error names
the entry, as `loops['fit_loop']['epoch_progress']`, and what belongs there.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from equipoise.errors import CheckpointError, ConfigurationError
from equipoise.parallel.snapshot.random_state import RandomState
from equipoise.safe_loading.stand_in import StandIn

__all__ = [
    "check_layout",
    "check_like",
    "check_optimizer_shapes",
    "check_optimizer_state",
    "check_version",
    "loading",
]

Check = Callable[[Any, str], None]

_LARGEST_COUNT = 2**63
_FROM_DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


def check_layout(checkpoint: dict[str, Any]) -> None:
    """Check the types of the entries that the trainer uses; others may be anything.

    Args:
        checkpoint: What was read, brought up to date.

    Raises:
        CheckpointError: Naming the first entry that is of another type.
    """
    _CHECKPOINT(checkpoint, "")


def check_version(checkpoint: dict[str, Any]) -> None:
    """Check the version of Lightning that a checkpoint names, which decides how to bring it up to date."""
    version = checkpoint["pytorch-lightning_version"]
    if not isinstance(version, str):
        raise _damaged("pytorch-lightning_version", "a text", version)


def check_like(current: Mapping[str, Any], saved: Any, place: str) -> None:
    """Check that a saved state has values of the kinds of the present ones, where both have one.

    Args:
        current: The options or the state of an object, as it is now.
        saved: What a checkpoint holds for it.
        place: The entry, for the error.

    Raises:
        CheckpointError: If a number, text, list or dictionary became something else.

    Example:
        >>> check_like({"lr": 0.1}, {"lr": 1, "new": None}, "lr_schedulers[0]")
    """
    _mapping(saved, place)
    for name, value in current.items():
        other = saved.get(name)
        if value is None or other is None:
            continue
        if isinstance(value, bool):
            _flag(other, f"{place}[{name!r}]")
            continue
        for kinds, allowed, expected in _KINDS:
            too_large = isinstance(other, int) and abs(other) >= _LARGEST_COUNT
            if isinstance(value, kinds) and (too_large or not isinstance(other, allowed)):
                raise _damaged(f"{place}[{name!r}]", expected, other)


def check_optimizer_state(state: Mapping[str, Any], place: str) -> None:
    """Check that what an optimiser keeps for its parameters is of one kind for all of them.

    Args:
        state: The optimiser's saved state.
        place: The entry, for the error.

    Raises:
        CheckpointError: If an average is no tensor where others are, or a count of steps is no count.
    """
    of_parameters = state.get("state", {})
    _mapping(of_parameters, f"{place}['state']")
    are_tensors: dict[str, bool] = {}
    for index, entries in of_parameters.items():
        if not isinstance(entries, dict):
            continue  # some optimisers keep something else
        for name, value in entries.items():
            here = f"{place}['state'][{index!r}][{name!r}]"
            if name == "step":
                _number_of_steps(value, here)
            elif value is not None and are_tensors.setdefault(name, isinstance(value, Tensor)) != isinstance(
                value, Tensor
            ):
                raise _damaged(here, "of the same kind as for the other parameters", value)


def check_optimizer_shapes(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Check that what one of torch's own optimisers keeps for a parameter has the parameter's shape.

    Only what has that shape in all of them is looked at; an optimiser of another class may keep whatever it wants.

    Args:
        optimizer: The optimiser.
        state: Its saved state.
        names: Names of parameters, by their identity.

    Raises:
        CheckpointError: Naming the first parameter to which something does not fit.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in state.get("param_groups", ()) for index in group.get("params", ())]
    for index, parameter in zip(indices, parameters, strict=False):
        entries = state.get("state", {}).get(index, {})
        for name in _SHAPED_AS_PARAMETERS & entries.keys():
            value = entries[name]
            if isinstance(value, Tensor) and value.shape != parameter.shape:
                raise CheckpointError(
                    f"The checkpoint's state of {type(optimizer).__name__} does not fit: {name!r} of the parameter"
                    f" {names.get(id(parameter), index)!r} has the shape {tuple(value.shape)}, but the parameter"
                    f" {tuple(parameter.shape)}. Let `configure_optimizers` return the same parameters in the same"
                    " order as then, or take another checkpoint."
                )


_SHAPED_AS_PARAMETERS = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf"),  # Adam, AdamW, NAdam, RAdam, Adamax, SparseAdam
    *("momentum_buffer", "square_avg", "grad_avg", "acc_delta"),  # SGD, Muon, RMSprop, Adadelta
    *("sum", "prev", "step_size", "ax"),  # Adagrad, Rprop, ASGD
}

# What a value is now, what it may be in a checkpoint, and how that is called.
_KINDS: tuple[tuple[Any, Any, str], ...] = (
    ((int, float), (int, float, Tensor), "a number"),
    (str, str, "a text"),
    ((list, tuple), (list, tuple), "a list"),
    (dict, dict, "a dictionary"),
)


@contextmanager
def loading(place: str, owner: object = None) -> Iterator[None]:
    """Turn errors while an entry is loaded into a `CheckpointError` that names it.

    Args:
        place: The entry.
        owner: The object that loads it. The errors of a class of the user stay what they are, with a note.

    Raises:
        CheckpointError: Instead of errors that a damaged entry causes.
    """
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except _FROM_DAMAGE as error:
        if owner is not None and not type(owner).__module__.startswith(("equipoise.", "lightning.", "torch.")):
            error.add_note(f"This happened while {place} of the checkpoint was loaded.")
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise CheckpointError(
            f"The checkpoint's entry {place} cannot be loaded ({reason}). Take another one."
        ) from error


def _damaged(place: str, expected: str, value: Any) -> CheckpointError:
    shown = f"{value!r:.60}" if isinstance(value, str | int | float | StandIn | None) else f"a {type(value).__name__}"
    return CheckpointError(f"The checkpoint is damaged: {place} must be {expected}, not {shown}. Take another one.")


# Kinds of entries


def _count(value: Any, place: str) -> None:
    if type(value) is not int or not 0 <= value < _LARGEST_COUNT:
        raise _damaged(place, "a non-negative integer", value)


def _number_of_steps(value: Any, place: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _LARGEST_COUNT
    if not number and not (isinstance(value, Tensor) and value.numel() == 1):
        raise _damaged(place, "a number of steps", value)


def _flag(value: Any, place: str) -> None:
    if type(value) is not bool:
        raise _damaged(place, "True or False", value)


def _mapping(value: Any, place: str) -> None:
    if not isinstance(value, dict):
        raise _damaged(place, "a dictionary", value)


def _named(value: Any, place: str) -> None:
    _mapping(value, place)
    for key in value:
        if not isinstance(key, str):
            raise _damaged(f"a key of {place}", "a text", key)


def _list(value: Any, place: str) -> None:
    if not isinstance(value, list | tuple):
        raise _damaged(place, "a list", value)


def _texts(value: Any, place: str) -> None:
    _list(value, place)
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise _damaged(f"{place}[{index}]", "a text", item)


def _each(check: Check) -> Check:
    def check_all(value: Any, place: str) -> None:
        _list(value, place)
        for index, item in enumerate(value):
            check(item, f"{place}[{index}]")

    return check_all


def _optional(check: Check) -> Check:
    def check_if_there(value: Any, place: str) -> None:
        if value is not None:
            check(value, place)

    return check_if_there


def _filled(check: Check) -> Check:
    def check_filled(value: Any, place: str) -> None:
        check(value, place)
        if not value:
            raise _damaged(place, "a filled list", value)

    return check_filled


def _unless_empty(check: Check) -> Check:
    def check_if_filled(value: Any, place: str) -> None:
        _mapping(value, place)
        if value:
            check(value, place)

    return check_if_filled


def _random_state(value: Any, place: str) -> None:
    _named(value, place)
    with loading(place):
        RandomState.from_state_dict(value)


def _gradient(value: Any, place: str) -> None:
    if value is not None and not isinstance(value, Tensor):
        raise _damaged(place, "a tensor", value)


def _fields(checks: dict[str, Check], *, required: bool = False) -> Check:
    """Return a check of a dictionary, each of whose known entries has a check of its own."""

    def check_fields(value: Any, place: str) -> None:
        _mapping(value, place)
        for name, check in checks.items():
            if required and name not in value:
                raise CheckpointError(f"The checkpoint is damaged: {place} lacks {name!r}. Take another one.")
            if name in value:
                check(value[name], f"{place}[{name!r}]" if place else name)

    return check_fields


# The layout

_COUNTS = _fields(dict.fromkeys(("ready", "started", "processed", "completed"), _count))
_PROGRESS = _fields({"total": _COUNTS, "current": _COUNTS, "is_last_batch": _flag})
_OPTIMIZER = _fields({"optimizer": _fields({"step": _PROGRESS, "zero_grad": _PROGRESS})})
_FIT_LOOP = _fields(
    {
        "state_dict": _mapping,
        "epoch_progress": _PROGRESS,
        "epoch_loop.state_dict": _fields({"_batches_that_stepped": _count}),
        "epoch_loop.batch_progress": _PROGRESS,
        "epoch_loop.scheduler_progress": _PROGRESS,
        "epoch_loop.automatic_optimization.optim_progress": _OPTIMIZER,
        "epoch_loop.manual_optimization.optim_step_progress": _PROGRESS,
        "epoch_loop.val_loop.batch_progress": _PROGRESS,
    }
)
_EVALUATION = _fields({"batch_progress": _PROGRESS})
_RANDOM_STATE = _fields({"global": _random_state, "generators": _list}, required=True)
_POSITION = _fields(
    {
        "random_state": _RANDOM_STATE,
        "epoch_random_state": _unless_empty(_RANDOM_STATE),  # empty before the first epoch of a run
        "order_drawn": _flag,
        "ahead": _list,
        "window": _named,
        "gradients": _each(_gradient),
        "logs": _fields({"callback_metrics": _mapping, "entries": _each(_named)}),
        "metrics": _named,
        "metrics_of_validation": _texts,
        "before_validation": _optional(_fields({"random_state": _RANDOM_STATE, "metrics": _named})),
    }
)
_LEFT = _fields({"loop": _FIT_LOOP, "positions": _filled(_each(_POSITION))}, required=True)
_EQUIPOISE = _fields(
    {
        "position": _optional(_POSITION),
        "positions": _each(_POSITION),
        "left": _optional(_LEFT),
        "strategy": _named,
    }
)
_CHECKPOINT = _fields(
    {
        "state_dict": _named,
        "epoch": _count,
        "global_step": _count,
        "callbacks": _mapping,
        "optimizer_states": _each(_mapping),
        "lr_schedulers": _each(_mapping),
        "loops": _fields(
            {"fit_loop": _FIT_LOOP, "validate_loop": _EVALUATION, "test_loop": _EVALUATION, "predict_loop": _EVALUATION}
        ),
        "equipoise": _EQUIPOISE,
    }
)
