"""Folders of configurations: named by a flag, found, or those of the example."""

import pytest

from equipoise.app.command_line.folders import take_folders


@pytest.mark.parametrize("flag", [("--config-dir", "more"), ("--config-dir=more",), ("-cd", "more"), ("-cd=more",)])
def test_every_form_of_the_flag_names_a_folder_and_takes_nothing_else(project, flag):
    (project / "more").mkdir()
    rest, folders = take_folders(["module.lr=1", *flag, "trainer.max_epochs=1", "--config-dir=conf"])
    assert rest == ["module.lr=1", "trainer.max_epochs=1"]
    assert folders == [project / "more", project / "conf"]


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
