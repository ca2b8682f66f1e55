"""`equipoise init`: the starter project."""

from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_init_says_what_the_project_needs(tmp_path, equipoise, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "scikit-learn" not in equipoise("init", "first")[1]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, _ = equipoise("init", "second")
    assert code == 0
    assert "not installed: pip install scikit-learn" in out


def test_init_in_the_present_folder(tmp_path, equipoise, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert equipoise("init", ".")[1].startswith("A project is in mine. Train it:\n\n  equipoise fit\n")


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


def test_init_writes_a_project(tmp_path, equipoise, monkeypatch):
    monkeypatch.chdir(tmp_path)
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
