"""Programs of users pass `mypy --strict` against the package, and mistakes in them are found.

mypy sees the package as an installed one, whose own errors and settings do not count.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.docs.blocks.pages import ROOT, blocks_of

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
PACKAGES = [
    "equipoise",
    *(
        f"equipoise.{name}"
        for name in ("callbacks", "extensions.planning", "extensions.report", "strategies", "trainer")
    ),
]
# Classes that the documentation shows, each as a file of its own.
SHOWN = {
    "halving_strategy.py": ("writing_a_strategy.md", "class HalvingStrategy"),
    "noisy_strategy.py": ("writing_a_strategy.md", "class NoisyGradientsStrategy"),
    "json_lines_logger.py": ("writing_a_logger.md", "class JSONLinesLogger"),
}


def block_with(text: str, page: str) -> str:
    (block,) = [block for block in blocks_of(ROOT / "docs" / page) if text in block.source]
    return block.source


def imports_of_all_names() -> str:
    """Return a module that imports every public name, and asks for its type."""
    lines = []
    for package in PACKAGES:
        for name in import_module(package).__all__:
            alias = f"{package}.{name}".replace(".", "_")
            lines += [f"from {package} import {name} as {alias}", f"reveal_type({alias})"]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of mypy for all programs."""
    folder = tmp_path_factory.mktemp("typed")
    for program in PROGRAMS.glob("*.py"):
        shutil.copy(program, folder)
    for name, (page, text) in SHOWN.items():
        (folder / name).write_text(block_with(text, page), encoding="utf-8")
    (folder / "all_names.py").write_text(imports_of_all_names(), encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
    files = sorted(path.name for path in folder.glob("*.py"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MYPY_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run([*command, *files], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout


def test_programs_pass_and_mistakes_are_found(checked: str) -> None:
    assert not [line for line in checked.splitlines() if ": error: " in line]


def test_every_public_name_has_a_type(checked: str) -> None:
    types = re.findall(r'^all_names\.py:(\d+): note: Revealed type is "(.*)"$', checked, flags=re.MULTILINE)
    names = imports_of_all_names().splitlines()
    assert len(types) == len(names) // 2
    assert not [names[int(line) - 1] for line, text in types if text == "Any"]
