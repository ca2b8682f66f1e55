"""Every block of code in the documentation does what its page says.

The blocks of a page run in their order in an empty folder: Python in one namespace, with warnings as errors; commands
are checked, and run where the page says so; data are parsed. `tests/docs/blocks/pages.py` describes the comments that
say how a block is treated. Pages whose blocks take many seconds are slow tests.
"""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.blocks.commands import Shell, check_syntax
from tests.docs.blocks.pages import PAGES, ROOT, Block, blocks_of, name_of
from tests.docs.blocks.python_blocks import check_python, run_python
from tests.docs.blocks.shell_words import commands_in

# Pages without commands that run, which take many seconds all the same.
SLOW = {
    "docs/configuration.md",
    "docs/eight_devices.md",
    "docs/fsdp.md",
    "docs/pipeline.md",
    "docs/planning.md",
    "docs/techniques/d_model_parallel.md",
    "docs/techniques/h_memory_remedies.md",
    "docs/tuning.md",
    "examples/digits/README.md",
}

PARSERS = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:The '.*' does not have many workers",
        "ignore:An epoch has",
        "ignore:Checkpoint directory .* exists and is not empty",
        r"ignore:.*isinstance\(treespec, LeafSpec\)",
    ),
    pytest.mark.usefixtures("quick_collections"),
]


def cases() -> list[Any]:
    """The pages, with the mark of the slow ones."""
    pages = []
    for page in PAGES:
        is_slow = name_of(page) in SLOW or "<!-- run -->" in page.read_text(encoding="utf-8")
        pages.append(pytest.param(page, id=name_of(page), marks=pytest.mark.slow if is_slow else ()))
    return pages


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a shell in which `python` and `equipoise` are those of this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    for name, options in {"python": "", "equipoise": "-m equipoise"}.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {options} "$@"\n')
        program.chmod(0o755)
    paths = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": paths, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.mark.few_cases(8)
@pytest.mark.parametrize("page", cases())
def test_blocks(page: Path, page_folder: Path, environment: dict[str, str]) -> None:
    shell = Shell(page_folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks_of(page):
        try:
            process(block, names, shell, environment)
        except Exception as error:
            error.add_note(f"in {block.place}")
            raise


def process(block: Block, names: dict[str, Any], shell: Shell, environment: dict[str, str]) -> None:
    """Run, check or parse a block."""
    # 1. What only exists as a file.
    if block.file is not None:
        Path(block.file).parent.mkdir(parents=True, exist_ok=True)
        Path(block.file).write_text(block.source, encoding="utf-8")

    # 2. Python and data.
    if block.language in ("python", "setup"):
        if block.mark == "not run":
            check_python(block)
        else:
            run_python(block, names)
    elif block.language in PARSERS:
        PARSERS[block.language](block.source)

    # 3. Commands.
    elif block.language == "bash":
        check_syntax(block)
        if block.mark == "run":
            subprocess.run(["bash", "-euo", "pipefail", "-c", block.source], env=environment, check=True)
        elif block.mark != "not run":
            for command in commands_in(block.source):
                shell.check(command)
