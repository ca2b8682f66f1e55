"""Completion in a shell."""

import subprocess
import sys
from pathlib import Path

import pytest


def asked(equipoise, monkeypatch, line, point=None):
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setenv("COMP_POINT", str(len(line) if point is None else point))
    code, out, err = equipoise("-sc", "query=bash")
    assert (code, err) == (0, "")
    return out.split()


@pytest.mark.few_cases(9)
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
        ("equipoise fit trainer.max_e", ["trainer.max_epochs="]),
        ("equipoise fit module.lr=1 strategy=s", ["strategy=single_device"]),
        ("equipoise fit experiment=", ["experiment=short"]),
        ("equipoise fit --mult", ["--multirun"]),
        ("equipoise fit --config-dir more module=", ["module=another", "module=line"]),
        ("equipoise fit nonsense=1 module.", []),
        ("equipoise devices ", []),
        ("equipoise devices --", ["--debug", "--help", "--watch", "--watch="]),
        pytest.param("equipoise compare --st", ["--steps=", "--strategies="], marks=pytest.mark.whole_package),
        pytest.param("equipoise compare trainer.max_e", ["trainer.max_epochs="], marks=pytest.mark.whole_package),
        pytest.param("equipoise export ", [], marks=pytest.mark.whole_package),
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


@pytest.mark.parametrize("command", ["completion bash", "completion zsh", "completion fish", "-sc install=fish"])
def test_completion_prints_what_to_eval(equipoise, command):
    code, out, _ = equipoise(*command.split())
    assert code == 0
    assert "equipoise" in out
    assert "COMP_LINE" in out
