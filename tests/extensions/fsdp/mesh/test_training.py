"""Modules that cut their layers over a device mesh in `configure_model`: equal to one device, in float64."""

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from equipoise import OOMRecovery
from equipoise.extensions.fsdp.mesh.grid import sizes_of
from tests.extensions.fsdp.mesh_modules import (
    CASES,
    RANDOM,
    Cut,
    CutAndSharded,
    CutApart,
    CutOnMeta,
    Differing,
)
from tests.extensions.fsdp.programs import (
    STEP,
    Net,
    assert_close,
    assert_refused_in_processes,
    assert_same_cases,
    fit,
    fsdp,
    in_processes,
    outcome,
    weights_of,
)
from tests.support.trainer_runs import refuses

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're using the WeightAveraging callback", "ignore:The cut layers of CutByHand were not compared"
)


# Two whole steps an epoch, and one of a single sample. A window of three steps needs a second one, and metrics compute
# in float32, so that their means are equal where they are rounded alike.
COUNTS = {"accumulated": 49, "counted once": 49}


def options_of(case: str) -> dict[str, Any]:
    return {"count": COUNTS.get(case, 25), "predicts": True, **{**CASES, **RANDOM}[case][2]}


@cache
def on_one_device(case: str) -> dict[str, Any]:
    kind, *_ = {**CASES, **RANDOM}[case]
    return outcome(kind, **options_of(case))


def on_mesh(case: str, rows: int, columns: int) -> dict[str, Any]:
    _, kind, _ = {**CASES, **RANDOM}[case]
    return outcome(kind, fsdp(tensor=columns), rows * columns, **{"batch_size": STEP // rows, **options_of(case)})


# What is summed over rows, or has other shards there.
OF_ROWS = [
    *("clipped, and fitted again", "accumulated", "fewer samples than processes", "sharded by the module", "weighted"),
    *("by hand", "counted once", "stepped by Muon"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "columns", "cases"), [(1, 2, [*CASES, *RANDOM]), (2, 2, OF_ROWS)], ids=["tensor 2", "data 2 x tensor 2"]
)
def test_training_of_cut_layers_equals_that_of_one_device(rows: int, columns: int, cases: list[str]) -> None:
    assert_same_cases(rows * columns, cases, on_one_device, partial(on_mesh, rows=rows, columns=columns))


# Options of the trainer, and the largest difference of weights of about 1 after five steps of at most 0.01 each.
OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "computed again": ({"activation_checkpointing": ["blocks.*"]}, 1e-12),
    "compiled": ({"compile": True}, 1e-12),
    "float32": ({"precision": "32-true", "gradient_clip_val": 0.1}, 1e-5),
    "float16": ({"precision": "16-mixed"}, 5e-3),
    "bfloat16": ({"precision": "bf16-mixed"}, 5e-2),
}


def with_options() -> list[Any]:
    """Return weights by case, and warnings; called in every process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = {
            name: weights_of(fit(Cut, fsdp(tensor=2), 2, batch_size=STEP, max_epochs=1, **options)[0])
            for name, (options, _) in OPTIONS.items()
        }
    return [found, [str(warning.message) for warning in caught]]


@pytest.mark.slow
def test_cut_layers_go_with_compiled_blocks_recomputation_and_short_precisions() -> None:
    found, messages = in_processes(2, with_options)
    for name, (options, tolerance) in OPTIONS.items():
        # The eager step is the reference.
        eager = {key: value for key, value in options.items() if key != "compile"}
        assert_close(weights_of(fit(Net, max_epochs=1, **eager)[0]), found[name], tolerance)
    assert not [message for message in messages if "were not compared" in message]
    (eager_block,) = [message for message in messages if message.startswith("Compiled blocks")]
    assert "stays eager, because there is a hook on its submodule" in eager_block


# The sizes of a mesh


@pytest.mark.parametrize(
    ("sizes", "processes", "of_machine", "expected"),
    [
        (("auto", 1), 6, 6, (6, 1)),
        (("auto", 2), 8, 4, (4, 2)),
        ((2, "auto"), 8, 8, (2, 4)),
        (("auto", "auto"), 8, 4, (2, 4)),
    ],
)
def test_sizes_follow_from_processes_and_machines(
    sizes: Any, processes: int, of_machine: int, expected: tuple[int, int]
) -> None:
    assert sizes_of(*sizes, processes, of_machine) == expected
    # Each place of a row may have two parts of sequences.
    assert sizes_of(*sizes, 2 * processes, 2 * of_machine, context=2) == expected


@pytest.mark.parametrize(
    ("data", "tensor", "words"),
    [
        (3, 2, "data=3 times tensor=2 is not the number of processes, 8"),
        ("auto", 3, "is not the number of processes, 8"),
        ("auto", 16, "is not the number of processes, 8"),
        ("auto", 8, "does not divide the 4 processes of this machine"),
    ],
)
def test_sizes_that_do_not_fit_the_processes_are_refused(data: Any, tensor: Any, words: str) -> None:
    refuses(lambda: sizes_of(data, tensor, 8, 4), words)


# What is refused


class Uncut(Net):
    """Its layers have odd widths."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks[:]


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "uncut": (Uncut, {}, "FSDPStrategy(tensor=2) has no plan of the layers of Uncut that are cut"),
    "on meta": (CutOnMeta, {}, "blocks.0.up.weight is cut and on the meta device"),
    "its own units": (CutAndSharded, {"units": ["blocks.*"]}, "has called `fully_shard`"),
    "tied": (CutApart, {}, "blocks.1.up.weight and blocks.2.up.weight were one parameter"),
    "other batches": (Differing, {}, "StepError: Ranks 0 and 1 compute a batch together, but have read different ones"),
}


@pytest.mark.slow
def test_modules_that_cannot_be_computed_on_a_mesh_are_refused() -> None:
    runs: dict[str, Any] = {
        name: partial(fit, kind, fsdp(tensor=2, **options), 2) for name, (kind, options, _) in REFUSED.items()
    }
    later = {"count": 240, "batch_size": 2, "max_epochs": 1}
    runs["other batches later"] = partial(fit, partial(Differing, 4), fsdp(tensor=2), 2, **later)
    runs["recovery"] = partial(fit, Cut, fsdp(tensor=2), 2, callbacks=[OOMRecovery()])
    further = {"recovery": ("one cannot do its step again alone",), "other batches later": REFUSED["other batches"]}
    assert_refused_in_processes(2, runs, {**REFUSED, **further})
