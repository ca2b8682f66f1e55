"""Checkpoints compared entry by entry: files and folders of shards, unusual tensors, and objects that are no data."""

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from equipoise import CheckpointError
from equipoise.extensions.equality import RunComparison, compare_runs, gaps
from equipoise.extensions.equality.gaps import Tolerance, largest_gap
from equipoise.parallel.shards.placeholders import make_placeholder
from tests.parallel.shards.folders import save
from tests.support.large_checkpoints import mebibytes_needed, write
from tests.support.trainer_runs import refuses


def compared(tmp_path: Path, first: dict[str, Any], second: dict[str, Any], **options: float) -> RunComparison:
    """Compare two checkpoints with some content."""
    for name, content in (("a", first), ("b", second)):
        torch.save({"state_dict": {}, "global_step": 1, **content}, tmp_path / f"{name}.ckpt")
    return compare_runs(tmp_path / "a.ckpt", tmp_path / "b.ckpt", **options)


def names(result: RunComparison) -> set[tuple[str, str]]:
    return {(difference.part, difference.name) for difference in result.differences}


DTYPES = ["float64", "float32", "bfloat16", "float8_e4m3fn", "complex64", "int64", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_each_dtype_are_compared(dtype: str, tmp_path: Path) -> None:
    value = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(getattr(torch, dtype))
    other = torch.tensor([[1, 0, 1], [0, 0, 1]]).to(getattr(torch, dtype))
    assert compared(tmp_path, {"state_dict": {"a": value}}, {"state_dict": {"a": value.clone()}}).equal
    (difference,) = compared(tmp_path, {"state_dict": {"a": value}}, {"state_dict": {"a": other}}).differences
    assert (difference.place, difference.amount) == ((1, 1), 1.0)


def test_whole_numbers_that_float64_cannot_tell_apart_differ(tmp_path: Path) -> None:
    big = torch.tensor([2**60, 5])
    assert names(compared(tmp_path, {"x": {"a": big, "b": 2**60}}, {"x": {"a": big + 1, "b": 2**60 + 1}})) == {
        ("other entries", "x.a"),
        ("other entries", "x.b"),
    }


NAN = torch.tensor([math.nan, math.inf, 1.0])


@pytest.mark.parametrize(
    ("first", "second", "atol", "place", "shown"),
    [
        (NAN, torch.tensor([math.nan, 1.0, 1.0]), 0, (1,), ("inf", "1.0", None)),
        (NAN, torch.tensor([2.0, math.inf, 1.0]), 10, (0,), ("nan", "2.0", None)),
        (torch.zeros(2), torch.tensor([0.0, -0.0]), 0, (1,), ("0.0", "-0.0", 0.0)),
        (torch.ones(2), torch.ones(2).double(), 0, (), ("torch.float32", "torch.float64", None)),
    ],
    ids=["infinite", "nan", "zero", "dtype"],
)
def test_infinite_values_signs_of_zero_and_dtypes_differ(
    first: Any, second: Any, atol: float, place: tuple[int, ...], shown: tuple[Any, ...], tmp_path: Path
) -> None:
    (difference,) = compared(tmp_path, {"x": first}, {"x": second}, atol=atol).differences
    assert (difference.place, (difference.first, difference.second, difference.amount)) == (place, shown)


def test_nan_equals_nan_and_dtypes_are_equal_within_a_tolerance(tmp_path: Path) -> None:
    assert compared(tmp_path, {"x": NAN, "y": [math.nan]}, {"x": NAN.clone(), "y": [math.nan]}).equal
    assert compared(tmp_path, {"x": torch.ones(2)}, {"x": torch.ones(2).double()}, atol=1e-9).equal


def test_nested_entries_are_compared_by_their_places(tmp_path: Path) -> None:
    """Numbers, texts, lists and missing entries, by the places where they stand."""
    first = {
        "optimizer_states": [
            {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}
        ],
        "lr_schedulers": [{"last_epoch": 3}],
        "callbacks": {"Mine": {"text": "a", "list": [1, 2, 3]}, "Another": {"x": 1}},
        "mine": {"array": np.arange(3), "many": torch.arange(3), "shape": torch.ones(2), "flag": True},
    }
    second = {
        "optimizer_states": [{"state": {0: {}}, "param_groups": [{"lr": 0.3, "betas": (0.9, 0.999)}]}],
        "lr_schedulers": [{"last_epoch": 4}],
        "callbacks": {"Mine": {"text": "b", "list": [1, 2, 4]}},
        "mine": {"array": np.arange(3), "many": torch.tensor([0, 1, 5]), "shape": torch.ones(3), "flag": False},
    }
    result = compared(tmp_path, first, second)
    found = {difference.name: difference for difference in result.differences}
    assert list(found) == [
        *("0.state.0.exp_avg", "0.param_groups.0.lr", "0.param_groups.0.betas", "0.last_epoch"),
        *("Mine.text", "Mine.list", "mine.many", "mine.shape", "mine.flag"),
    ]
    assert (found["0.state.0.exp_avg"].first, found["0.state.0.exp_avg"].second) == ("present", "absent")
    assert str(found["0.param_groups.0.lr"]) == "0.param_groups.0.lr 0.1 and 0.3 (0.2)"
    assert found["0.param_groups.0.betas"].place == (1,)
    assert (found["Mine.text"].first, found["mine.shape"].second) == ("'a'", "shape (3,)")
    assert found["mine.many"].amount == 3
    assert result.not_compared == [
        f"callbacks: Another, which {tmp_path / 'a.ckpt'} alone has",
        "other entries: mine.array, which is no plain data",
    ]


class Runs:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sparse = torch.eye(2).to_sparse()
    result = compared(tmp_path, {"x": Runs(), "y": sparse}, {"x": Runs(), "y": sparse})
    assert result.equal
    assert result.not_compared == [f"other entries: {name}, which is no plain data" for name in "xy"]
    assert not (tmp_path / "ran").exists()


def test_a_compiled_module_has_the_names_of_the_module(tmp_path: Path) -> None:
    states = [{"net.weight": torch.ones(1)}, {"net._orig_mod.weight": torch.ones(1)}]
    result = compared(tmp_path, {"state_dict": states[0]}, {"state_dict": states[1]})
    assert (result.equal, result.tensors) == (True, 1)


def test_positions_of_other_numbers_of_processes_are_not_compared(tmp_path: Path) -> None:
    positions: list[dict[str, Any]] = [
        {
            "equipoise": {"steps": {"processes": count}, "position": {"pos": count}},
            "loops": {"fit_loop": {"epoch_loop.val_loop.batch_progress": {"total": count}}},
        }
        for count in (1, 2)
    ]
    result = compared(tmp_path, *positions)
    assert result.equal
    assert result.not_compared == ["resumption and validated batches: of 1 and 2 processes"]


def test_containers_that_hold_themselves_are_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    refuses(lambda: compared(tmp_path, {"x": loop}, {"x": loop}), "nested too deeply", error=CheckpointError)


# Large tensors, and those in shards.


def test_a_tensor_that_ends_too_early_is_refused() -> None:
    pieces = ([torch.ones(4)], [torch.ones(19)])
    refuses(lambda: largest_gap(*pieces, 19, Tolerance(0, 0)), "is damaged", error=CheckpointError)


def test_a_file_is_compared_with_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps, "_ELEMENTS", 4)
    tensors = {"a": torch.randn(7, 3), "b": torch.arange(5).bfloat16()}
    named = {name: make_placeholder(value, name) for name, value in tensors.items()}
    torch.save({"state_dict": tensors, "global_step": 2}, tmp_path / "x.ckpt")
    save(tmp_path / "run" / "y.ckpt", tensors, {"state_dict": named, "global_step": 2}, count=3)
    result = compare_runs(tmp_path / "x.ckpt", tmp_path / "run" / "y.ckpt")
    assert (result.equal, result.tensors) == (True, 2)
    tensors["a"][4, 2] += 1
    tensors["a"][1, 0] += 0.5
    tensors["a"][6, 2] += 0.5
    save(tmp_path / "z.ckpt", tensors, {"state_dict": named, "global_step": 2}, count=2)
    # A folder around it is a run.
    (difference,) = compare_runs(tmp_path / "run", tmp_path / "z.ckpt").differences
    assert (difference.name, difference.place) == ("a", (4, 2))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["file", "folder"])
def test_large_checkpoints_are_compared_in_the_memory_of_a_few_pieces(form: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    write(path, form)
    imports = "import equipoise.extensions.equality.compare as equality"
    statement = "assert equality.compare_runs(*sys.argv[1:3]).equal"
    assert 8 < mebibytes_needed(imports, statement, str(path), str(path)) < 300
