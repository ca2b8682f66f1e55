"""The package in examples/extension: installed, tested by its own tests, short, and made of public names alone."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "examples" / "extension"
MOST_LINES = 300
# The modules whose names docs/extending.md calls public.
PUBLIC = {"equipoise", "equipoise.app", "equipoise.extensions.report"}


def sources() -> list[Path]:
    return sorted(path for path in EXTENSION.rglob("*.py") if "build" not in path.parts)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a process in which the package is installed, from its folder and without a network."""
    pytest.importorskip("hatchling")
    site = tmp_path_factory.mktemp("site")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(site), str(EXTENSION)]
    subprocess.run(command, check=True)
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{site}", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
def test_its_own_tests_pass(installed: dict[str, str], tmp_path: Path) -> None:
    options = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "--rootdir",
        str(tmp_path),
        "-c",
        os.devnull,
        "-W",
        "error",
    ]
    command = [sys.executable, "-m", "pytest", *options, "-q", str(EXTENSION / "tests")]
    run = subprocess.run(command, env=installed, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"^4 passed in", run.stdout, flags=re.MULTILINE), run.stdout


@pytest.mark.slow
def test_the_command_line_knows_its_names(installed: dict[str, str], tmp_path: Path) -> None:
    def equipoise(*arguments: str) -> str:
        command = [sys.executable, "-m", "equipoise", *arguments]
        run = subprocess.run(command, env=installed, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout + run.stderr

    assert "exchanges of an epoch under ddp and local_sgd" in equipoise("--help")
    on_two = ("strategy=local_sgd", "trainer.devices=2", "trainer.accelerator=cpu")
    # 1168 images, 128 in a step.
    assert equipoise("rounds", *on_two, "strategy.every=3").splitlines()[-2:] == [
        "ddp        10 exchanges of gradients in an epoch",
        "local_sgd  4 exchanges of parameters, one after 3 steps each",
    ]
    short = ("trainer.max_epochs=1", "trainer.limit_train_batches=5", "trainer.enable_progress_bar=false")
    equipoise(
        "fit", *on_two, "strategy.every=2", "strategy.warmup_steps=1", "callbacks=[model_checkpoint,divergence]", *short
    )
    (report,) = tmp_path.glob("outputs/*/*/report.html")
    # Steps 1, 3 and 5.
    assert '<td>local_sgd</td><td class="number">3</td>' in report.read_text(encoding="utf-8")


def test_it_is_short() -> None:
    files = [*sources(), *EXTENSION.glob("*.toml")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) < MOST_LINES


def imported_names(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.whole_package
def test_it_uses_public_names_alone() -> None:
    for path in sources():
        for module, name in imported_names(path):
            if module.split(".")[0] == "equipoise":
                assert module in PUBLIC, f"{path.name} imports {module}"
                assert name in import_module(module).__all__, f"{path.name} imports {name} from {module}"
        tree = ast.parse(path.read_text(encoding="utf-8"))
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert {name for name in attributes if re.match(r"_(?!_)", name)} == set(), path.name


def test_the_page_calls_these_modules_public() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for module in PUBLIC:
        assert f"`{module}`" in page
