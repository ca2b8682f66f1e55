"""`equipoise curves-equal` on a terminal."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.__main__ import main


def curves_equal(*arguments: Any) -> int:
    return main(["curves-equal", *map(str, arguments)])


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that differ at step 2, and at step 10 in twenty weights."""
    monkeypatch.chdir(tmp_path)
    for name, shift in (("a", 0.0), ("b", 0.001)):
        folder = tmp_path / name
        folder.mkdir()
        losses = ["0.75", "0.5", str(0.731 + shift)]
        rows = [f"0,{step},{loss},{shift}" for step, loss in enumerate(losses)]
        (folder / "metrics.csv").write_text("\n".join(["epoch,step,train_loss,step_time", *rows, ""]))
        state = {f"layers.{index}.weight": torch.full((2, 3), shift * index) for index in range(21)}
        torch.save({"state_dict": state, "global_step": 10}, folder / "epoch=0-step=10.ckpt")


def test_equal_runs_end_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert curves_equal("a", "a") == 0
    assert capsys.readouterr().out == (
        "equal to the bit: 3 logged values at 3 steps, 1 checkpoint, 21 tensors\n"
        "left out, as they differ by nature: step_time\n"
    )
    assert curves_equal("a", "b", "--atol=0.1") == 0
    assert "equal within atol=0.1 and rtol=0: 3 logged" in capsys.readouterr().out


def test_runs_that_differ_end_with_1_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert curves_equal("a", "b") == 1
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert " ".join(out.split()).startswith(
        "differ first at step 2: train_loss 0.731 and 0.732 (0.001);"
        " weights of step 10: layers.1.weight by at most 0.001 at (0, 0) and 19 more"
    )
    table = [line.split() for line in lines]
    assert ["2", "train_loss", "0.731", "0.732", "0.001", "logged", "values"] in table
    assert sum("weights" in row for row in table) == 12  # eleven rows, and the sentence
    assert "and 9 more, which --json lists" in lines


def test_differences_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert curves_equal("a", "b", "--json", "--rtol=1e-9") == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["equal"], result["rtol"], len(result["differences"])) == (False, 1e-9, 21)
    first = {"step": 2, "part": "logged values", "name": "train_loss", "first": "0.731", "second": "0.732", "place": []}
    assert result["differences"][0] == first | {"amount": 0.732 - 0.731}
    assert result["sentence"].startswith("differ first at step 2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "equipoise curves-equal takes RUN_A RUN_B"),
        (["a"], "it was given a."),
        (["a", "none"], "There is no file or folder 'none'."),
        (["a", "b", "--atol=small"], "--atol takes a number, such as --atol=1e-6, not 'small'"),
        (["a", "b", "--atol=-1"], "atol is a number from 0, not -1.0"),
        (["a", "b", "--tol=1"], "not --tol=1"),
        (["a/metrics.csv", "b/epoch=0-step=10.ckpt"], "nothing to compare: a/metrics.csv has logged values"),
    ],
)
def test_wrong_arguments_end_with_2_and_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert curves_equal(*arguments) == 2
    assert message in capsys.readouterr().err
