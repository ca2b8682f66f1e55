"""The commands that train nothing: help, version, init, completion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from equipoise import __version__
from equipoise.app.command_line.commands import OWN_COMMANDS, command_named
from equipoise.app.command_line.quick_check import refuse_unknown_keys, trainer_arguments
from equipoise.app.config.keys import KEYS
from equipoise.names.extensions import names_of_extensions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_help_names_every_command(equipoise, arguments):
    code, out, _ = equipoise(*arguments)
    assert code == 0
    for command in ("fit", "validate", "test", "predict", "devices", "doctor", "init", "completion", "--debug"):
        assert command in out


@pytest.mark.parametrize("command", [*OWN_COMMANDS, *names_of_extensions("commands")])
def test_help_of_a_command_explains_its_flags(equipoise, command):
    code, out, _ = equipoise(command, "--help")
    assert code == 0
    assert out.startswith(f"equipoise {command} ")
    flags = dict(command_named(command).flags)
    assert all(flags.values())
    # Without Hydra and outside of a project, those of the program itself run.
    assert command not in OWN_COMMANDS or "--config-dir" not in out
    for flag, meaning in flags.items():
        assert f"  {flag}" in out
        assert meaning in " ".join(out.split())


@pytest.mark.parametrize("arguments", [("--version",), ("fit", "--version")])
def test_version(equipoise, arguments):
    assert equipoise(*arguments)[:2] == (0, f"equipoise {__version__}\n")


@pytest.mark.whole_package
def test_help_of_a_run_shows_groups_keys_and_flags(project, equipoise):
    code, shown, _ = equipoise("fit", "-h")
    assert code == 0
    assert "strategy: auto, balanced, ddp, dp, ensemble, fsdp, hogwild, pipeline, single_device, virtual" in shown
    assert "experiment: short" in shown
    assert "early_stopping" in shown
    assert "  lr: 0.1" in shown  # the present values
    assert "--multirun" in shown
    assert "key=value" in shown
    lines = shown.splitlines()
    # Each argument of the trainer has a line of meaning.
    start = lines.index(next(line for line in lines if line.startswith("trainer:")))
    end = lines.index(next(line for line in lines if line.startswith("strategy: auto  ")))
    keys = [line for line in lines[start + 1 : end] if not line.startswith("   ")]
    assert len(keys) == len(trainer_arguments())
    assert {"self", "ckpt_path"}.isdisjoint(trainer_arguments())
    assert [line for line in keys if not line[40:].strip()] == []


def test_help_where_no_module_is_chosen_yet(project, equipoise):
    (project / "conf" / "config.yaml").unlink()
    code, out, _ = equipoise("fit", "--help")
    assert code == 0
    assert "module: line" in out


def test_help_of_a_key(project, equipoise):
    code, out, _ = equipoise("fit", "--help", "trainer.max_epochs", "trainer.max_epochs=7")
    assert code == 0
    first, *meaning = out.splitlines()
    assert first == "trainer.max_epochs: type int | None, default null, here 7"
    assert " ".join(meaning).count("epochs after which training ends") == 1
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


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("--version", 0),
        ("--help", 0),
        ("plan --help", 0),
        ("fit trainer.max_epoch=3", 2),
        ("train", 2),
    ],
)
def test_an_answer_that_needs_no_torch_imports_none(project, arguments, code):
    program = (
        "import sys\nfrom equipoise.__main__ import main\ncode = main(sys.argv[1:])\n"
        "print(*sorted({'hydra', 'lightning', 'rich', 'torch'} & set(sys.modules)), file=sys.stderr)\nsys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == code
    assert done.stderr.splitlines()[-1] == ""


@pytest.mark.thorough
def test_a_reader_that_ends_ends_the_command_silently(project):
    """`equipoise --help | head -1`: the rest of the output has no reader."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "equipoise", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with os.fdopen(write_end, "w") as closed:
        done = subprocess.run(
            command, stdout=closed, stderr=subprocess.PIPE, text=True, env=environment, timeout=300, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


OWN_TRAINERS = {
    "config.yaml": "trainer:\n  max_epochs: 1\n  _target_: mine.Trainer\n",
    "trainer/mine.yaml": "_target_: mine.Trainer\n",
    "experiment/short.yaml": "# @package _global_\n\ntrainer:\n  _target_: mine.Trainer\n",
    "other.yaml": "hydra:\n  searchpath:\n    - pkg://mine\n",
}


@pytest.mark.parametrize("file", OWN_TRAINERS)
def test_keys_of_a_trainer_of_ones_own_are_checked_with_its_class(file, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(OWN_TRAINERS[file])
    refuse_unknown_keys(["trainer.of_mine=1"], [tmp_path])
    refuse_unknown_keys(["trainer._target_=mine.Trainer", "trainer.of_mine=1"], [])
