"""Checks of what works, and what is refused, in a process that was made to look like one of another system.

usage: python -X warn_default_encoding -m tests.platforms.checks windows|macos FOLDER

FOLDER contains the weights of the same trainings on this system. What fails is an assertion.
"""

import contextlib
import io
import os
import sys
import warnings
from pathlib import Path

import pytest

from tests.platforms.macos import simulate_macos
from tests.platforms.windows import simulate_windows

SYSTEMS = {"windows": simulate_windows, "macos": simulate_macos}
# Arguments of a fit of the digits that takes a second.
SHORT = ("trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.enable_progress_bar=false")
REASON = "needs a fork server, and POSIX signals between processes, but Windows has neither."


def main() -> None:
    """Check one system."""
    name, path = sys.argv[1:]
    folder = Path(path)
    SYSTEMS[name]()
    # Text that our files write or read is UTF-8, unless they say something else.
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", category=EncodingWarning, module="equipoise")

    check_fits(folder)
    check_command(folder)
    if name == "windows":
        check_processes()


def check_fits(folder: Path) -> None:
    import torch

    from tests.platforms.training import fit

    for file in folder.glob("*.pt"):
        weights = fit(file.stem, folder / file.stem)
        expected = torch.load(file)
        assert all(torch.equal(weights[key], expected[key]) for key in expected), file


def works(*arguments: str) -> str:
    """Return all that a command has printed."""
    from equipoise.__main__ import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(arguments)
    assert code == 0, printed.getvalue()
    return printed.getvalue()


def check_command(folder: Path) -> None:
    from equipoise.__main__ import main

    # 1. A command line as a shell gives it; what the output cannot show is replaced.
    sys.argv[:] = ["equipoise", "--help"]
    assert main() == 0
    print("\N{FULL BLOCK}")
    # 2. Commands without a run.
    assert "equipoise fit" in works("--help")
    assert "cpu" in works("devices")
    works("doctor")
    works("doctor", "--json")
    os.chdir(folder)
    works("init", "project")
    os.chdir("project")
    # 3. Runs: twice the same checkpoints, a report, a table, two devices, a sweep.
    printed = works("fit", *SHORT, "callbacks=[model_checkpoint]")
    assert "Report" in printed
    works("fit", *SHORT, "trainer.max_epochs=2", "ckpt_path=last", "callbacks=[model_checkpoint]")
    works("fit", *SHORT, "strategy=dp", "trainer.devices=[cpu,cpu]")
    works("fit", "--multirun", *SHORT, "module.lr=0.1,0.01")
    works("test", "ckpt_path=best")
    assert list(Path("outputs").rglob("report.html"))


def check_processes() -> None:
    """A strategy of processes is refused; several devices without a strategy have one that needs none."""
    from equipoise import ConfigurationError, Trainer
    from tests.platforms.training import QUIET

    with pytest.raises(ConfigurationError) as refused:
        Trainer(strategy="ddp", devices=2, **QUIET)
    assert str(refused.value).startswith(f"A run in 2 processes {REASON} Take strategy='single_device', or 'dp'")
    assert Trainer(devices=2, **QUIET).connected_strategy.name == "dp"
    assert Trainer(devices=1, **QUIET).connected_strategy.name == "single_device"


if __name__ == "__main__":
    main()
