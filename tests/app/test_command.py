"""The commands that train nothing: help, version, init, completion."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.hydra_config import HydraConfig

from equipoise import __version__
from equipoise.app.config.checks import KEYS
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


# The starter project.


def test_where_nothing_is_configured_the_example_runs_and_says_so(tmp_path, equipoise, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = equipoise("fit", "--cfg", "job", "--package", "module._target_")
    assert (code, out.strip()) == (0, "digits.module.ConvNet")
    assert "this is the digits example" in err


def test_the_example_says_what_it_needs(tmp_path, equipoise, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = equipoise("fit")
    assert code == 2
    assert "pip install scikit-learn" in err


def test_init_says_what_the_project_needs(tmp_path, equipoise, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "scikit-learn" not in equipoise("init", "first")[1]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, _ = equipoise("init", "second")
    assert code == 0
    assert "not installed: pip install scikit-learn" in out


@pytest.mark.whole_package
def test_a_subfolder_of_a_project_is_not_the_place_of_the_example(project, equipoise, monkeypatch):
    below = project / "data" / "raw"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    for command in ("fit", "plan", "savings", "compare"):
        code, _, err = equipoise(command)
        assert code == 2
        assert str(project / "conf") in err
        assert "cd ../.." in err
        assert "digits" not in err
    assert not list(below.iterdir())
    code, out, _ = equipoise("fit", "--config-dir", "../../conf", "--cfg", "job", "--package", "module._target_")
    assert (code, out.strip()) == (0, "tiny.module.Line")


def test_a_folder_conf_of_something_else_is_left_aside(tmp_path, equipoise, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("server: {port: 80}\n")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    code, out, _ = equipoise("fit", "--cfg", "job", "--package", "module._target_")
    assert (code, out.strip()) == (0, "digits.module.ConvNet")


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


def test_init_refuses_what_is_not_empty(project, equipoise):
    (project / "full").mkdir()
    (project / "full" / "file").touch()
    (project / "file").touch()
    for name in ("full", "file"):
        code, _, err = equipoise("init", name)
        assert code == 2
        assert "new or empty folder" in err
    assert [path.name for path in (project / "full").iterdir()] == ["file"]


def test_init_says_why_it_cannot_write(tmp_path, equipoise):
    code, _, err = equipoise("init", "/proc/nowhere/mine")
    assert code == 2
    assert "cannot write into '/proc/nowhere/mine'" in err


@pytest.mark.parametrize("there", [False, True])
def test_init_writes_a_project(tmp_path, equipoise, monkeypatch, there):
    monkeypatch.chdir(tmp_path)
    if there:
        (tmp_path / "mine").mkdir()
    code, out, _ = equipoise("init", "mine")
    assert code == 0
    assert "cd mine && equipoise fit" in out
    written = {path.relative_to(tmp_path / "mine").as_posix() for path in (tmp_path / "mine").rglob("*")}
    assert {
        "digits/module.py",
        "digits/data.py",
        "conf/config.yaml",
        "tests/test_digits.py",
        "README.md",
        ".gitignore",
    } <= written
    assert not any("__pycache__" in name or "outputs" in name for name in written)
    # It is the example to the letter.
    for name in written:
        path = tmp_path / "mine" / name
        assert path.is_dir() or path.read_bytes() == (ROOT / "examples" / "digits" / name).read_bytes()


# Completion.


def asked(equipoise, monkeypatch, line, point=None):
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line) if point is None else point))
    code, out, err = equipoise("-sc", "query=bash")
    assert (code, err) == (0, "")
    return out.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        pytest.param(
            "equipoise ",
            [
                *("fit", "validate", "test", "predict", "devices", "doctor", "plan", "savings", "compare", "init"),
                *("completion", "curves-equal", "export", "runs", "tune", "verify", "watch"),
            ],
            marks=pytest.mark.whole_package,
        ),
        pytest.param("equipoise plan --h", ["--help", "--html="], marks=pytest.mark.whole_package),
        ("equipoise f", ["fit"]),
        ("equipoise fit trainer.max_e", ["trainer.max_epochs="]),
        ("equipoise validate trainer.max_e", ["trainer.max_epochs="]),
        ("equipoise fit module.lr=1 strategy=s", ["strategy=single_device"]),
        ("equipoise fit experiment=", ["experiment=short"]),
        ("equipoise fit --mult", ["--multirun"]),
        ("equipoise fit --config-dir more module=", ["module=another", "module=line"]),
        ("equipoise fit --config-dir nowhere module=", []),
        ("equipoise fit nonsense=1 module.", []),
        ("equipoise devices ", []),
        ("equipoise doctor ", []),
        ("equipoise doctor --", ["--debug", "--help", "--json"]),
        pytest.param("equipoise compare --st", ["--steps=", "--strategies="], marks=pytest.mark.whole_package),
        pytest.param("equipoise compare trainer.max_e", ["trainer.max_epochs="], marks=pytest.mark.whole_package),
        pytest.param("equipoise savings --j", ["--json"], marks=pytest.mark.whole_package),
        pytest.param("equipoise export ", [], marks=pytest.mark.whole_package),
        pytest.param("equipoise export --de", ["--debug"], marks=pytest.mark.whole_package),
        pytest.param("equipoise export --c", [], marks=pytest.mark.whole_package),
        ("equipoise nonsense --", []),
    ],
)
def test_completion(project, equipoise, monkeypatch, line, offered):
    (project / "more" / "module").mkdir(parents=True)
    (project / "more" / "module" / "another.yaml").write_text("{}")
    assert sorted(asked(equipoise, monkeypatch, line)) == sorted(offered)


def test_completion_keeps_quiet_about_a_broken_configuration(project, equipoise, monkeypatch):
    (project / "conf" / "config.yaml").write_text("defaults: [")
    assert asked(equipoise, monkeypatch, "equipoise fit trainer.max_e") == []


def test_completion_in_the_middle_of_a_line(project, equipoise, monkeypatch):
    line = "equipoise fit strategy=s trainer.max_epochs=3"
    assert asked(equipoise, monkeypatch, line, point=len("equipoise fit strategy=s")) == ["strategy=single_device"]


@pytest.mark.slow
def test_completion_in_a_real_shell(project):
    script = f"""
        PATH="{Path(sys.executable).parent}:$PATH"
        eval "$(equipoise completion bash)"
        COMP_LINE="equipoise fit trainer.max_e" COMP_POINT=27 COMP_CWORD=2
        hydra_bash_completion
        echo "${{COMPREPLY[@]}}"
        """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["trainer.max_epochs="]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize("command", ["completion {}", "-sc install={}"])
def test_completion_prints_what_to_eval(equipoise, command, shell):
    code, out, _ = equipoise(*command.format(shell).split())
    assert code == 0
    assert "equipoise" in out
    assert "COMP_LINE" in out
