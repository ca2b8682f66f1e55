"""Check the layout of a checkpoint before any part of it is used.

A complete file can hold a text in place of a counter, if another program or a person has changed it. The error names
the entry, such as `loops['fit_loop']['epoch_progress']`, and the expected kind of value.
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

# Integers of torch have 64 bits.
_LARGEST_COUNT = 2**63

# Errors that damaged entries cause.
_FROM_DAMAGE = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)


def check_layout(checkpoint: dict[str, Any]) -> None:
    """Check the types of the entries that the trainer uses; other entries may be of any type.

    Args:
        checkpoint: The content of the file, after its migration.

    Raises:
        CheckpointError: If an entry is of another type; the message names the first.
    """
    _CHECKPOINT(checkpoint, "")


def check_version(checkpoint: dict[str, Any]) -> None:
    """Check the type of the version of Lightning in a checkpoint, on which its migration depends."""
    version = checkpoint["pytorch-lightning_version"]
    if not isinstance(version, str):
        raise _damaged("pytorch-lightning_version", "a text", version)


def check_like(current: Mapping[str, Any], saved: Any, place: str) -> None:
    """Check that the values of a saved state are of the same kinds as the present values.

    Only names that both have are compared.

    Args:
        current: The present options or state of an object.
        saved: The saved ones.
        place: The entry, for the error.

    Raises:
        CheckpointError: If a number, text, list or dictionary became something else.

    Example:
        >>> check_like({"lr": 0.1}, {"lr": 1, "new": None}, "lr_schedulers[0]")
    """
    _mapping(saved, place)
    for name, value in current.items():
        saved_value = saved.get(name)
        if value is not None and saved_value is not None:
            _check_kind(value, saved_value, f"{place}[{name!r}]")


def _check_kind(value: Any, saved_value: Any, place: str) -> None:
    """Check that a saved value is of the kind of the present one."""
    # True and False are integers, too, so they come first.
    if isinstance(value, bool):
        _flag(saved_value, place)
        return
    for kinds, saved_kinds, expected in _KINDS:
        if not isinstance(value, kinds):
            continue
        if not isinstance(saved_value, saved_kinds):
            raise _damaged(place, expected, saved_value)
        if isinstance(saved_value, int) and abs(saved_value) >= _LARGEST_COUNT:
            raise _damaged(place, expected, saved_value)


def check_optimizer_state(state: Mapping[str, Any], place: str) -> None:
    """Check that the state of an optimiser has values of the same kinds for all parameters.

    Args:
        state: The optimiser's saved state.
        place: The entry, for the error.

    Raises:
        CheckpointError: If a value is a tensor for some parameters only, or a number of steps is none.
    """
    parameter_states = state.get("state", {})
    _mapping(parameter_states, f"{place}['state']")
    # Whether a value is a tensor, by its name, as for the first parameter that has it.
    are_tensors: dict[str, bool] = {}
    for index, entries in parameter_states.items():
        # Some optimisers save something else.
        if not isinstance(entries, dict):
            continue
        for name, value in entries.items():
            value_place = f"{place}['state'][{index!r}][{name!r}]"
            if name == "step":
                _number_of_steps(value, value_place)
                continue
            if value is None:
                continue
            is_tensor = isinstance(value, Tensor)
            if are_tensors.setdefault(name, is_tensor) != is_tensor:
                raise _damaged(value_place, "of the same kind as for the other parameters", value)


def check_optimizer_shapes(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """Check that the state of one of torch's optimisers has the shapes of its parameters.

    Only values that have that shape in every optimiser of torch are checked. Optimisers of other classes are not.

    Args:
        optimizer: The optimiser.
        state: Its saved state.
        names: Names of parameters, by their identity.

    Raises:
        CheckpointError: If a shape does not fit; the message names the first such parameter.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return

    # 1. Parameters, and their indices in the saved state, in the same order.
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    indices: list[Any] = []
    for saved_group in state.get("param_groups", ()):
        indices += saved_group.get("params", ())

    # 2. Shapes.
    parameter_states = state.get("state", {})
    for index, parameter in zip(indices, parameters, strict=False):
        entries = parameter_states.get(index, {})
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
    # Adam, AdamW, NAdam, RAdam, Adamax, SparseAdam
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    # SGD, Muon, RMSprop, Adadelta
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
    # Adagrad, Rprop, ASGD
    "sum",
    "prev",
    "step_size",
    "ax",
}

# Types of a present value, types of a saved one, and their name in messages.
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
        owner: The object that loads it. Errors of a class of the user are raised as they are, with a note.

    Raises:
        CheckpointError: In place of errors that a damaged entry causes.
    """
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except _FROM_DAMAGE as error:
        if owner is not None and not type(owner).__module__.startswith(("equipoise.", "lightning.", "torch.")):
            error.add_note(f"This happened while {place} of the checkpoint was loaded.")
            raise
        # In one line: messages of torch have several.
        words = f"{type(error).__name__}: {error}".split()
        reason = " ".join(words).rstrip(".")
        raise CheckpointError(
            f"The checkpoint's entry {place} cannot be loaded ({reason}). Take another one."
        ) from error


def _damaged(place: str, expected: str, value: Any) -> CheckpointError:
    text = f"a {type(value).__name__}"
    # Only these are short for certain.
    if isinstance(value, str | int | float | StandIn | None):
        text = f"{value!r:.60}"
    return CheckpointError(f"The checkpoint is damaged: {place} must be {expected}, not {text}. Take another one.")


# Checks of kinds of entries: each takes a value and its place


def _count(value: Any, place: str) -> None:
    if type(value) is not int or not 0 <= value < _LARGEST_COUNT:
        raise _damaged(place, "a non-negative integer", value)


def _number_of_steps(value: Any, place: str) -> None:
    # Torch's optimisers count in a tensor, others in a number.
    is_count = False
    if isinstance(value, Tensor):
        is_count = value.numel() == 1
    elif isinstance(value, int | float) and not isinstance(value, bool):
        is_count = 0 <= value < _LARGEST_COUNT
    if not is_count:
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


# Checks made of others


def _list_of(check: Check) -> Check:
    def check_all(value: Any, place: str) -> None:
        _list(value, place)
        for index, item in enumerate(value):
            check(item, f"{place}[{index}]")

    return check_all


def _optional(check: Check) -> Check:
    def check_unless_none(value: Any, place: str) -> None:
        if value is not None:
            check(value, place)

    return check_unless_none


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
    """Return a check of a dictionary.

    Args:
        checks: A check for each entry. Other entries may be of any type.
        required: Whether all these entries must exist. Default: False.
    """

    def check_fields(value: Any, place: str) -> None:
        _mapping(value, place)
        for name, check in checks.items():
            if name in value:
                # The outermost entries have no place before them.
                entry_place = name
                if place:
                    entry_place = f"{place}[{name!r}]"
                check(value[name], entry_place)
            elif required:
                raise CheckpointError(f"The checkpoint is damaged: {place} lacks {name!r}. Take another one.")

    return check_fields


# The layout

# Counters of the loops, under Lightning's names.
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

# The position of a process in an epoch.
_RANDOM_STATE = _fields({"global": _random_state, "generators": _list}, required=True)
_POSITION = _fields(
    {
        "random_state": _RANDOM_STATE,
        # Empty before the first epoch of a run.
        "epoch_random_state": _unless_empty(_RANDOM_STATE),
        "order_drawn": _flag,
        "ahead": _list,
        "window": _named,
        "gradients": _list_of(_gradient),
        "logs": _fields({"callback_metrics": _mapping, "entries": _list_of(_named)}),
        "metrics": _named,
        "metrics_of_validation": _texts,
        "before_validation": _optional(_fields({"random_state": _RANDOM_STATE, "metrics": _named})),
    }
)
_LEFT = _fields({"loop": _FIT_LOOP, "positions": _filled(_list_of(_POSITION))}, required=True)

# The entry of Equipoise, and the whole file.
_EQUIPOISE = _fields(
    {
        "position": _optional(_POSITION),
        "positions": _list_of(_POSITION),
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
        "optimizer_states": _list_of(_mapping),
        "lr_schedulers": _list_of(_mapping),
        "loops": _fields(
            {"fit_loop": _FIT_LOOP, "validate_loop": _EVALUATION, "test_loop": _EVALUATION, "predict_loop": _EVALUATION}
        ),
        "equipoise": _EQUIPOISE,
    }
)
