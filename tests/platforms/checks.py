"""Checks of what works, and what is refused, in a process that was made to look like one of another system.

usage: python -X warn_default_encoding -m tests.platforms.checks windows|macos FOLDER

FOLDER contains the weights of the same trainings on this system. What fails is an assertion.
"""

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        check_refused_strategies()
        check_refused_commands()
        check_auto()


def check_fits(folder: Path) -> None:
    import torch

    from tests.platforms.training import fit

    for file in folder.glob("*.pt"):
        weights = fit(file.stem, folder / file.stem)
        expected = torch.load(file)
        assert all(torch.equal(weights[key], expected[key]) for key in expected), file


def run(*arguments: str) -> tuple[int, str]:
    """Return the exit code of a command, and all that it has printed."""
    from equipoise.__main__ import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main(arguments)
    return code, printed.getvalue()


def works(*arguments: str) -> str:
    code, printed = run(*arguments)
    assert code == 0, printed
    return printed


def refuses(*arguments: str) -> str:
    code, printed = run(*arguments)
    assert code == 2, printed
    assert "Traceback" not in printed
    return printed


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


def message_of(function: Callable[..., Any], **options: Any) -> str:
    """Return the message of a ConfigurationError."""
    from equipoise import ConfigurationError

    try:
        function(**options)
    except ConfigurationError as error:
        return str(error)
    raise AssertionError(f"{options} is not refused.")


def check_refused_strategies() -> None:
    from equipoise import HogwildStrategy, PipelineStrategy, Trainer, predict_memory
    from tests.platforms.training import QUIET, Perceptron

    for strategy in ("ddp", "fsdp", "hogwild", "virtual", "ddp_spawn", HogwildStrategy(processes=2)):
        message = message_of(Trainer, strategy=strategy, devices=2, **QUIET)
        assert message.startswith(f"A run in 2 processes {REASON} Take strategy='single_device', or 'dp'"), message
        assert "WSL 2" in message
    message = message_of(Trainer, strategy=PipelineStrategy(engine="processes"), devices=2, **QUIET)
    assert message.startswith(f"engine='processes' {REASON} Take engine='threads'"), message
    # In one process all of them are there.
    for strategy in ("ddp", "fsdp", "hogwild", "virtual", "pipeline", "balanced", "ensemble"):
        Trainer(strategy=strategy, devices=1, **QUIET)
    Trainer(strategy="pipeline", devices=2, **QUIET)
    assert REASON in message_of(predict_memory, module=Perceptron(), data=None)


def check_refused_commands() -> None:
    before = set(Path().rglob("*"))
    for command in ("plan", "savings", "compare"):
        message = f"equipoise {command} {REASON} Run it under Linux or macOS, or in WSL 2 on Windows."
        assert refuses(command) == f"equipoise: {message}\n"
    printed = refuses("fit", "--multirun", *SHORT, "module.lr=0.1,0.01", "launcher=pool")
    assert f"launcher=pool {REASON} Leave launcher out" in printed
    printed = refuses("fit", *SHORT, "data.batch_size=auto")
    assert f"data.batch_size=auto {REASON} Give a number" in printed
    # Nothing has begun.
    assert set(Path().rglob("*")) == before
    printed = refuses("fit", *SHORT, "strategy=ddp", "trainer.devices=[cpu,cpu]")
    assert f"A run in 2 processes {REASON}" in printed


def check_auto() -> None:
    """Several devices and no strategy: that which needs no processes."""
    from equipoise import Trainer
    from tests.platforms.training import QUIET

    assert Trainer(devices=2, **QUIET).connected_strategy.name == "dp"
    assert Trainer(devices=1, **QUIET).connected_strategy.name == "single_device"


if __name__ == "__main__":
    main()
