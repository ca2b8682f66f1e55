"""Output of every command on a terminal of 80 columns, in a pipe and in a file: its widths and its words."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from equipoise.app.command_line.commands import names_of_commands
from equipoise.app.config.keys import STAGES
from equipoise.extensions.runs.watch.server import WatchServer
from equipoise.tables.width import FILE_WIDTH

SCREEN = 80
_CODES = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]")
# Ends of lines that may be wider than a file's: paths and overrides, which are copied.
_WHOLE = re.compile(r"\S{40,}$")

COMMANDS = [
    "--help",
    "fit --help",
    "fit --help trainer",
    "fit trainer.enable_progress_bar=true trainer.enable_model_summary=true",
    "validate ckpt_path=last",
    "test ckpt_path=last",
    "predict ckpt_path=last",
    "runs",
    "watch --port=0",
    "export first/checkpoints/epoch=1-step=4.ckpt weights.safetensors",
    "init another",
    "curves-equal first second",
    "doctor",
    "devices",
    "fit trainer.gpus=2",
    "fit ckpt_path=last module.lr=0.7 trainer.max_epochs=3",
    *(f"{name} --help" for name in names_of_commands()),
    *(
        pytest.param(command, marks=pytest.mark.slow)
        for command in (
            "plan trainer.devices=2 data.count=64",
            "compare trainer.devices=2 --steps=2 --strategies=dp,balanced",
            "savings",
            "tune --seconds=2",
            "verify",
        )
    ),
]


def test_each_command_is_measured() -> None:
    lines = [str(command if isinstance(command, str) else command.values[0]) for command in COMMANDS]
    measured = {line.split()[0] for line in lines if "--help" not in line}
    # That of `completion` is a program for a shell.
    assert measured >= {*STAGES, *names_of_commands()} - {"completion"}


@pytest.fixture
def runs(project: Path, equipoise: Callable[..., tuple[int, str, str]]) -> None:
    """Two runs of which the first values differ, with a checkpoint each."""
    for name, lr in (("first", 0.1), ("second", 0.25)):
        assert equipoise("fit", f"module.lr={lr}", f"hydra.run.dir={name}", "trainer.max_epochs=2")[0] == 0
    (project / "outputs").mkdir()
    for name in ("first", "second"):
        (project / "outputs" / name).symlink_to(project / name)


def _check(text: str, width: int) -> None:
    """Check that no line is wider, unless by one long word, and that no table is broken by the edge of the screen."""
    for line in text.splitlines():
        shown = line.rpartition("\r")[2].rstrip()
        if len(shown) > width:
            assert _WHOLE.search(shown), f"{len(shown)} characters: {shown!r}"
            assert not re.search("[─━═]{3}", shown), f"a rule of {len(shown)} characters"
    assert "…" not in text


def _interrupt(server: WatchServer) -> None:
    raise KeyboardInterrupt


@pytest.mark.thorough
@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("command", COMMANDS)
def test_widths_and_words(
    equipoise: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(WatchServer, "serve_forever", _interrupt)

    # 1. In a pipe or a file.
    _, out, _ = equipoise(*command.split())
    _check(out, FILE_WIDTH)

    # 2. On a terminal.
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(SCREEN))
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    text = _CODES.sub("", "".join(equipoise(*command.split())[1:]))
    _check(text, SCREEN)

    # 3. The same words, and none is divided: those of a run are measured anew.
    if "--help" in command:
        assert text.split() == out.split()
