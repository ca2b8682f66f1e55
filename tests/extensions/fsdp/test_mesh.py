"""Modules that cut their layers over a device mesh in `configure_model`: equal to one device, in float64."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch

from equipoise import ConfigurationError, FSDPStrategy
from equipoise.extensions.fsdp.mesh.grid import sizes_of
from tests.extensions.fsdp.mesh_modules import CASES, RANDOM, CutAndSharded, CutApart, CutOnMeta, Differing
from tests.extensions.fsdp.programs import (
    Net,
    assert_each_close,
    errors_of,
    fit,
    fsdp,
    in_processes,
    loader,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:You're using the WeightAveraging callback", "ignore:The cut layers of CutByHand were not compared"
)


def outcome(
    kind: Callable[[], Any], options: dict[str, Any], strategy: Any, processes: int, rows: int
) -> dict[str, Any]:
    """Fit, and return all weights and values; with the option `again`, fit once more."""
    options = {"batch_size": 12 // rows, **options}
    again = options.pop("again", False)
    more = options.pop("more", dict)
    module, trainer = fit(kind, strategy, processes, **options, **more())
    values = {f"{name} in fit": float(value) for name, value in trainer.callback_metrics.items()}
    values |= {f"first {name}": value for name, value in weights_of(module).items()}
    outputs = trainer.predict(module, loader(7, 3))
    assert outputs is not None
    values["predictions"] = torch.cat(outputs)
    if again:
        module, _ = fit(kind, strategy, processes, **{**options, "max_epochs": 1, "module": module})
        values |= weights_of(module)
    return values


@cache
def on_one_device(case: str) -> dict[str, Any]:
    kind, _, options = {**CASES, **RANDOM}[case]
    return outcome(kind, options, "single_device", 1, 1)


def run_all(rows: int, columns: int, cases: list[str]) -> dict[str, dict[str, Any]]:
    outcomes = {}
    for case in cases:
        _, kind, options = {**CASES, **RANDOM}[case]
        outcomes[case] = outcome(kind, options, fsdp(tensor=columns), rows * columns, rows)
    return outcomes


@pytest.mark.parametrize(
    ("rows", "columns", "cases"),
    [
        pytest.param(1, 2, [*CASES, *RANDOM], marks=pytest.mark.slow, id="tensor 2"),
        pytest.param(2, 2, [*CASES], marks=pytest.mark.slow, id="data 2 x tensor 2"),
    ],
)
def test_training_equals_that_of_one_device(rows: int, columns: int, cases: list[str]) -> None:
    assert_each_close(on_one_device, in_processes(rows * columns, partial(run_all, rows, columns, cases)))


# What is refused


NAMES = "context_blocks must be a list of names"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor": 0}, "tensor must be 'auto' or a whole number from 1, not 0"),
        ({"data": "all"}, "data must be 'auto'"),
        ({"data": True}, "data must be 'auto'"),
        ({"context": 0}, "context must be a whole number from 1, not 0"),
        ({"context": "auto"}, "context must be a whole number from 1, not 'auto'"),
        ({"context": True}, "context must be a whole number"),
        ({"tensor": 2, "replicas": 2}, "tensor=2 and replicas=2 do not go together"),
        ({"tensor": "auto", "cpu_offload": True}, "tensor='auto' and cpu_offload=True"),
        ({"context": 2, "replicas": 2}, "context=2 and replicas=2 do not go together"),
        ({"context": 2, "cpu_offload": True}, "context=2 and cpu_offload=True"),
        ({"context": 2, "context_blocks": "network.blocks"}, NAMES),
        ({"context": 2, "context_blocks": [1]}, NAMES),
        ({"context": 2, "context_blocks": []}, NAMES),
        ({"context_blocks": ["network.blocks"]}, "over `context` processes, but context=1"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        FSDPStrategy(**options)


@pytest.mark.parametrize(
    ("sizes", "processes", "of_machine", "expected"),
    [
        (("auto", 1), 6, 6, (6, 1)),
        (("auto", 2), 8, 4, (4, 2)),
        ((2, "auto"), 8, 8, (2, 4)),
        (("auto", "auto"), 8, 4, (2, 4)),
        ((4, 2), 8, 2, (4, 2)),
    ],
)
def test_sizes(sizes: Any, processes: int, of_machine: int, expected: tuple[int, int]) -> None:
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
def test_sizes_that_do_not_fit(data: Any, tensor: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        sizes_of(data, tensor, 8, 4)


class Uncut(Net):
    """Its layers have odd widths."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks[:]


def refusals() -> dict[str, str]:
    """Return the errors of runs that are refused; called in every process."""
    runs: dict[str, Any] = {}
    for kind, options in (
        (Uncut, {}),
        (CutOnMeta, {}),
        (CutAndSharded, {"units": ["blocks.*"]}),
        (CutApart, {}),
        (Differing, {}),
    ):
        runs[kind.__name__] = partial(fit, kind, fsdp(tensor=2, **options), 2)
    return errors_of(runs)


@pytest.mark.slow
def test_what_cannot_be_computed_is_refused() -> None:
    found = in_processes(2, refusals)
    assert "FSDPStrategy(tensor=2) has no plan of the layers of Uncut that are cut" in found["Uncut"]
    assert "blocks.0.up.weight is cut and on the meta device" in found["CutOnMeta"]
    assert "has called `fully_shard`" in found["CutAndSharded"]
    assert "blocks.1.up.weight and blocks.2.up.weight were one parameter" in found["CutApart"]
    differing = "StepError: Ranks 0 and 1 compute a batch together, but have read different ones"
    assert found["Differing"].startswith(differing)
