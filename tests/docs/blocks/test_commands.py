"""Commands on pages are checked as `tests/docs/blocks/commands.py` says."""

from pathlib import Path

import pytest

from equipoise import ConfigurationError
from tests.docs.blocks.commands import Shell
from tests.docs.blocks.shell_words import commands_in


def check(script: str, folder: Path) -> None:
    shell = Shell(folder)
    for command in commands_in(script):
        shell.check(command)


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    "script",
    [
        "make test-all",
        "pip install '.[examples,tensorboard]'",
        "python benchmarks/overhead/main.py && python -m pytest tests/docs",
        "equipoise fit module.lr=0.1 strategy=dp 'trainer.devices=[cpu,cpu]' # with a comment",
        "equipoise fit data.batch_size=auto",
        "equipoise fit --multirun module.lr=0.1,0.01 launcher=pool",
        "torchrun --nproc-per-node 2 ... -m equipoise fit ckpt_path=last",
        "equipoise plan trainer.devices=2x24GiB --json",
        "equipoise compare --strategies=dp,ddp --largest",
        "equipoise init mine && cd mine && equipoise fit module.channels=8",
        "cd examples/digits && equipoise fit module.channels=8",
    ],
)
def test_what_works_is_accepted(script: str, page_folder: Path) -> None:
    check(script, page_folder)


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("make tset", "make has no tset"),
        ("pip install '.[exmples]'", "no extra"),
        ("python missing.py", "there is no missing.py"),
        ("python -m missing", "there is no module missing"),
        ("equipoise fitt", "there is no command fitt"),
        ("equipoise fit --mulirun module.lr=0.1", "has no flag --mulirun"),
        ("equipoise fit module.learning=0.1", "module.learning"),
        ("equipoise fit --multirun module.lr=a,b", "must be of type float"),
        ("srun equipoise fit strategy=dpp", "dpp"),
        ("equipoise plan trainer.devices=2x24Gib trainer.nodes=1", "trainer.nodes"),
        ("equipoise plan trainer.devices=2x24apples", "apples"),
        ("equipoise compare --strategies=dpp", "dpp"),
        ("cd examples/digits && equipoise fit module.width=8", "module.width"),
    ],
)
def test_what_would_fail_is_found(script: str, message: str, page_folder: Path) -> None:
    with pytest.raises((AssertionError, ConfigurationError), match=message):
        check(script, page_folder)
