"""Runs compared: equal to the bit, and where they differ first."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from equipoise import CheckpointError, Trainer
from equipoise.extensions.equality import compare_runs
from tests.extensions.equality.runs import Nudge, run
from tests.support.trainer_runs import refuses

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("first"))


@pytest.mark.thorough
def test_the_same_run_is_equal_to_the_bit(first: Path, tmp_path: Path) -> None:
    result = compare_runs(first, run(tmp_path))
    assert result.equal
    assert not result.differences
    assert not result.not_compared
    assert result.sentence == f"equal to the bit: 8 logged values at 6 steps, 7 checkpoints, {result.tensors} tensors"
    # Weights and buffers, and three tensors of Adam for each of six parameters, at least.
    assert result.tensors > 7 * (9 + 18)
    assert {"step_time", "time_elapsed", "dirpath", "hyper_parameters"} <= set(result.left_out)
    assert not {"train_loss", "val_loss"} & set(result.left_out)


@pytest.mark.thorough
def test_the_first_step_that_differs_is_named(first: Path, tmp_path: Path) -> None:
    """The first checkpoint after a change of a weight shows the weight, and the next step the loss."""
    second = run(tmp_path, Trainer, Nudge(2, 1e-6))
    result = compare_runs(first, second)
    assert not result.equal
    found = {(difference.part, difference.name): difference for difference in result.differences}
    saved = found["weights", "layers.0.weight"]
    assert (saved.step, saved.place) == (2, (3, 1))
    assert saved.amount == pytest.approx(1e-6)
    logged = found["logged values", "train_loss"]
    assert logged.step == 2
    assert logged.amount == pytest.approx(abs(float(logged.first) - float(logged.second)))
    # Nothing but this weight differs at the step: neither optimisers nor the position.
    at_two = {key for key, difference in found.items() if difference.step == 2}
    assert at_two == {("weights", "layers.0.weight"), ("logged values", "train_loss"), ("logged values", "val_loss")}
    assert found["optimisers", "0.state.0.exp_avg"].step == 3
    assert result.sentence == f"differ first at step 2: {logged} and 1 more; weights of step 2: {saved}"
    assert str(saved) == "layers.0.weight by at most 1e-06 at (3, 1)"
    assert compare_runs(first, second, atol=1e-2).equal
    assert not compare_runs(first, second, rtol=1e-13).equal
    # Of checkpoints before it everything is equal.
    names = [next(folder.glob("checkpoints/*step=1.ckpt")) for folder in (first, second)]
    assert compare_runs(*names).equal


def test_a_run_of_lightnings_trainer_is_equal(first: Path, tmp_path: Path) -> None:
    result = compare_runs(first, run(tmp_path, L.Trainer))
    assert result.equal, result.sentence
    assert (result.logged_values, result.steps, result.checkpoints) == (8, 6, 7)
    assert f"resumption: all, which {first} alone has" in result.not_compared
    assert result.sentence.endswith("; something was not compared, see below")


def test_steps_that_only_one_run_has_are_named(first: Path, tmp_path: Path) -> None:
    second = run(tmp_path, every=2, log_every_n_steps=2)
    result = compare_runs(first, second)
    assert result.equal
    assert (result.logged_values, result.steps, result.checkpoints) == (5, 4, 4)
    assert f"checkpoints that {first} alone has: of steps 1, 3, 5" in result.not_compared
    assert f"logged values that {first} alone has: train_loss, of steps 0, 2, 4" in result.not_compared


def test_a_run_is_compared_with_its_table_or_a_checkpoint(first: Path) -> None:
    table = compare_runs(first, first / "metrics.csv")
    assert (table.equal, table.logged_values, table.checkpoints) == (True, 8, 0)
    saved = compare_runs(first / "checkpoints" / "last.ckpt", first)
    assert (saved.equal, saved.logged_values, saved.checkpoints) == (True, 0, 1)


def test_what_cannot_be_compared_is_refused(first: Path, tmp_path: Path) -> None:
    def compare(*paths: Any, **options: Any) -> Any:
        return lambda: compare_runs(*paths, **options)

    (one,), (two,) = (list(first.glob(f"checkpoints/*step={step}.ckpt")) for step in (1, 2))
    refuses(compare(first, tmp_path), "is no folder of a run")
    refuses(compare(one, two), "nothing to compare", "checkpoints of step 1;", "checkpoints of step 2.")
    refuses(compare(first, first, rtol=float("nan")), "rtol is a number from 0")
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.csv").write_text("step,loss\n0,1.0\n")
    refuses(compare(first, tmp_path), "holds several runs", str(tmp_path / "b"))
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    refuses(compare(first, tmp_path / "table.csv"), "has no column 'step'")
    torch.save({"state_dict": {"other": torch.ones(1)}, "global_step": 1}, tmp_path / "x.ckpt")
    refuses(compare(one, tmp_path / "x.ckpt"), "are of other modules", "layers.0.weight")
    (tmp_path / "x.ckpt").write_bytes(one.read_bytes()[:-100])
    refuses(compare(one, tmp_path / "x.ckpt"), "cannot be read", error=CheckpointError)
