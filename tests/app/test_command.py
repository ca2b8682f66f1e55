"""The commands that train nothing: help, version, init, completion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from equipoise import __version__
from equipoise.app.config.keys import KEYS
from equipoise.app.help import arguments_in

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",), ("devices", "--help"), ("doctor", "-h")])
def test_help_names_every_command(equipoise, arguments):
    code, out, _ = equipoise(*arguments)
    assert code == 0
    for command in ("fit", "validate", "test", "predict", "devices", "doctor", "init", "completion", "--debug"):
        assert command in out


@pytest.mark.parametrize("arguments", [("--version",), ("fit", "--version")])
def test_version(equipoise, arguments):
    assert equipoise(*arguments)[:2] == (0, f"equipoise {__version__}\n")


@pytest.mark.slow
@pytest.mark.whole_package
def test_help_of_a_run_shows_groups_keys_and_flags(project, equipoise, capfd):
    with pytest.raises(SystemExit) as ended:
        equipoise("fit", "-h")
    assert ended.value.code == 0
    shown = capfd.readouterr().out
    assert "strategy: auto, balanced, ddp, dp, ensemble, fsdp, hogwild, pipeline, single_device, virtual" in shown
    assert "experiment: short" in shown
    assert "early_stopping" in shown
    assert "  lr: 0.1" in shown  # the present values
    assert "--multirun" in shown
    assert "key=value" in shown


@pytest.mark.slow
def test_help_where_no_module_is_chosen_yet(project, equipoise, capfd):
    (project / "conf" / "config.yaml").unlink()
    with pytest.raises(SystemExit) as ended:
        equipoise("fit", "--help")
    assert ended.value.code == 0
    assert "module: line" in capfd.readouterr().out


def test_help_of_a_key(project, equipoise):
    code, out, _ = equipoise("fit", "--help", "trainer.max_epochs", "trainer.max_epochs=7")
    assert code == 0
    first, *meaning = out.splitlines()
    assert first == "trainer.max_epochs: type int | None, default null, here 7"
    assert "epochs after which training ends" in " ".join(meaning)
    assert equipoise("fit", "module.lr=0.5", "-h", "module.lr")[1].startswith("module.lr: type float, here 0.5")


@pytest.mark.whole_package
def test_help_of_a_part_explains_its_arguments(project, equipoise):
    code, out, _ = equipoise("fit", "--help", "callbacks.run_summary", "seed")
    assert code == 0
    assert "builds equipoise.extensions.report.run_summary.RunSummary" in out
    assert "callbacks.run_summary.table: type bool, default true" in out
    assert "seed: here null\n  Seeds Python" in out


def test_help_of_every_key_of_ours(project, equipoise, monkeypatch):
    # As in a new process: an earlier run in this one has set Hydra's own values.
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    keys = [key for key in KEYS if key != "hydra"]
    code, out, err = equipoise("fit", "--help", *keys)
    assert code == 0, err
    assert all(f"\n\n{key}" in f"\n\n{out}" for key in keys)


def test_help_of_a_key_that_does_not_exist(project, equipoise):
    code, _, err = equipoise("fit", "--help", "trainer.max_epoch")
    assert code == 2
    assert "no key 'trainer.max_epoch' in the configuration; did you mean 'trainer.max_epochs'?" in err
    code, _, err = equipoise("fit", "--help", "seed", "trainer=nothing")
    assert code == 2
    assert "no 'nothing' in the group 'trainer'" in err


def test_arguments_of_a_docstring():
    assert arguments_in(
        "One.\n\nArgs:\n    a: First,\n        continues.\n    b, c (int): Both.\n\nReturns:\n    d: No.\n"
    ) == {
        "a": "First, continues.",
        "b": "Both.",
        "c": "Both.",
    }
    assert arguments_in("Nothing here.") == {}


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--help",), pytest.param(("fit", "--help"), marks=pytest.mark.slow)])
def test_a_reader_that_ends_ends_the_command_silently(project, arguments):
    """`equipoise fit --help | head -1`: the rest of the output has no reader."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "equipoise", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with os.fdopen(write_end, "w") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, env=environment, timeout=300, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")
