"""Check the layout of a checkpoint before any part of it is used.

A complete file can hold a text in place of a counter, if another program or a person has changed it. The error names
the entry, such as `loops['fit_loop']['epoch_progress']`, and the expected kind of value.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from equipoise.errors import CheckpointError
from equipoise.interop.lightning.self_log import LogOptions
from equipoise.interop.torch.optimizers import is_of_torch
from equipoise.trainer.checkpointing.entry_checks import (
    LARGEST_COUNT,
    Filled,
    Kind,
    OrEmpty,
    OrMissing,
    OrNone,
    Whole,
    any_list,
    anything,
    check,
    count,
    damaged,
    flag,
    gradient,
    mapping,
    named_entries,
    number,
    number_of_steps,
    positive_count,
    random_state,
    text,
)
from equipoise.trainer.checkpointing.file import OUR_KEY

__all__ = [
    "check_layout",
    "check_like",
    "check_optimizer_shapes",
    "check_optimizer_state",
    "check_version",
]


def check_layout(checkpoint: dict[str, Any]) -> None:
    """Check the types of the entries that the trainer uses; other entries may be of any type.

    Args:
        checkpoint: The content of the file, after its migration.

    Raises:
        CheckpointError: If an entry is of another type; the message names the first.
    """
    check(_CHECKPOINT, checkpoint, "")


def check_version(checkpoint: dict[str, Any]) -> None:
    """Check the type of the version of Lightning in a checkpoint, on which its migration depends."""
    check(text, checkpoint["pytorch-lightning_version"], "pytorch-lightning_version")


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
    check(mapping, saved, place)
    for name, value in current.items():
        saved_value = saved.get(name)
        if value is not None and saved_value is not None:
            _check_kind(value, saved_value, f"{place}[{name!r}]")


def _check_kind(value: Any, saved_value: Any, place: str) -> None:
    """Check that a saved value is of the kind of the present one."""
    # True and False are integers, too, so they come first.
    if isinstance(value, bool):
        check(flag, saved_value, place)
        return
    for kinds, saved_kinds, expected in _KINDS:
        if not isinstance(value, kinds):
            continue
        if not isinstance(saved_value, saved_kinds):
            raise damaged(place, expected, saved_value)
        if isinstance(saved_value, int) and abs(saved_value) >= LARGEST_COUNT:
            raise damaged(place, expected, saved_value)


def check_optimizer_state(state: Mapping[str, Any], place: str) -> None:
    """Check that the state of an optimiser has values of the same kinds for all parameters.

    Args:
        state: The optimiser's saved state.
        place: The entry, for the error.

    Raises:
        CheckpointError: If a value is a tensor for some parameters only, or a number of steps is none.
    """
    parameter_states = state.get("state", {})
    check(mapping, parameter_states, f"{place}['state']")
    # Whether a value is a tensor, by its name, as for the first parameter that has it.
    are_tensors: dict[str, bool] = {}
    for index, entries in parameter_states.items():
        # Some optimisers save something else.
        if not isinstance(entries, dict):
            continue
        for name, value in entries.items():
            value_place = f"{place}['state'][{index!r}][{name!r}]"
            if name == "step":
                check(number_of_steps, value, value_place)
                continue
            if value is None:
                continue
            is_tensor = isinstance(value, Tensor)
            if are_tensors.setdefault(name, is_tensor) != is_tensor:
                raise damaged(value_place, "of the same kind as for the other parameters", value)


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
    if not is_of_torch(optimizer):
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


def _are_sizes(value: Any) -> bool:
    if value is None:
        return True
    return any_list.fits(value) and all(map(_NUMBER.fits, value))


def _are_options(value: Any) -> bool:
    if not any_list.fits(value) or len(value) != len(LogOptions._fields):
        return False
    options = LogOptions(*value)._asdict()
    # A function, or its name.
    del options["reduce_fx"]
    return all(option is None or isinstance(option, int) for option in options.values())


def _change(least: int) -> Kind:
    """Return the kind of an entry that begins with a path: the name of an object, and names or keys from there."""

    def is_path(path: Any) -> bool:
        return any_list.fits(path) and len(path) > 0 and text.fits(path[0]) and all(map(is_step, path[1:]))

    def is_step(step: Any) -> bool:
        return text.fits(step) or (any_list.fits(step) and len(step) == 1)

    return Kind(
        "a list that begins with a path",
        lambda entry: any_list.fits(entry) and len(entry) >= least and is_path(entry[0]),
    )


# The layout

# Counters of the loops, under Lightning's names.
_COUNTS = dict.fromkeys(("ready", "started", "processed", "completed"), count)
_PROGRESS = {"total": _COUNTS, "current": _COUNTS, "is_last_batch": flag}
_FIT_LOOP = {
    "state_dict": mapping,
    "epoch_progress": _PROGRESS,
    "epoch_loop.state_dict": {"_batches_that_stepped": count},
    "epoch_loop.batch_progress": _PROGRESS,
    "epoch_loop.scheduler_progress": _PROGRESS,
    "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": _PROGRESS, "zero_grad": _PROGRESS}},
    "epoch_loop.manual_optimization.optim_step_progress": _PROGRESS,
    "epoch_loop.val_loop.batch_progress": _PROGRESS,
}
_EVALUATION = {"batch_progress": _PROGRESS}

# What hooks have set, by kind, with the least number of items of an entry.
_CHANGES = {"values": 3, "generators": 2, "aliases": 2, "objects": 3, "deleted": 1}
_HOOK_STATE = OrMissing({name: [_change(least)] for name, least in _CHANGES.items()})

# The position of a process in an epoch.
_RANDOM_STATE = Whole({"global": random_state, "generators": any_list})
_LOGGED = ("total", "step", "key", "options", "dataloader_idx", "metric", "weight", "dtype")
_OPTIONS = Kind("the arguments of `self.log`", _are_options)
_POSITION = Whole(
    {
        "random_state": _RANDOM_STATE,
        # Empty before the first epoch of a run.
        "epoch_random_state": OrEmpty(_RANDOM_STATE),
        "order_drawn": flag,
        "ahead": any_list,
        "batch_end": OrMissing(OrNone(any_list)),
        "window": named_entries,
        "gradients": [gradient],
        "logs": Whole(
            {"callback_metrics": mapping, "entries": [Whole({**dict.fromkeys(_LOGGED, anything), "options": _OPTIONS})]}
        ),
        "metrics": named_entries,
        "hook_state": _HOOK_STATE,
        "data_before_order": _HOOK_STATE,
        "before_request": OrMissing(OrEmpty(Whole({"random_state": random_state, "hook_state": _HOOK_STATE}))),
        "metrics_of_validation": [text],
        "validated": OrMissing([text]),
        "loaders": OrMissing(OrEmpty(Whole({"loaded_at": number, "workers": any_list}))),
        "monitors": OrMissing(mapping),
        "before_validation": OrNone({"random_state": _RANDOM_STATE, "metrics": named_entries}),
    }
)

# The steps of the run.
_NUMBER = Kind("a positive integer or None", lambda value: value is None or positive_count.fits(value))
_SIZES = Kind("a list of sizes or None", _are_sizes)
_STEPS = Whole({"processes": _NUMBER, "seed": count, "batch_sizes": _SIZES, "step_sizes": _SIZES})

# The entry of Equipoise, and the whole file.
_EQUIPOISE = {
    "run": text,
    "position": OrNone(_POSITION),
    "positions": [_POSITION],
    "left": OrNone(Whole({"loop": _FIT_LOOP, "positions": Filled([_POSITION])})),
    "steps": OrNone(_STEPS),
    "strategy": named_entries,
    "switches": {"requires_grad": named_entries, "training": named_entries},
}
_CHECKPOINT = {
    "state_dict": named_entries,
    "epoch": count,
    "global_step": count,
    "callbacks": mapping,
    "optimizer_states": [mapping],
    "lr_schedulers": [mapping],
    "loops": {
        "fit_loop": _FIT_LOOP,
        "validate_loop": _EVALUATION,
        "test_loop": _EVALUATION,
        "predict_loop": _EVALUATION,
    },
    OUR_KEY: _EQUIPOISE,
}
