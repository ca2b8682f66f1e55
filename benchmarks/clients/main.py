"""Runs the own tests of libraries that build on Lightning's Trainer, with Lightning's Trainer and with ours.

    python benchmarks/clients/main.py --sources FOLDER [--libraries gluonts darts] [--limit MINUTES]

Each library gets an environment of its own, with exact versions, under `--environments`. Its tests come from a folder
with the library's name under `--sources`: an unpacked sdist, or a checkout of the repository at the version's tag.
Counted are tests that run a Trainer and pass with Lightning's. The table shows how many of them pass with ours, and
names the others.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TORCH = "torch==2.13.0"
TORCHVISION = "torchvision==0.28.0"
LIGHTNING = "lightning==2.6.6"
# The project's own requirements, without the project: it is imported from this checkout.
OWN_NEEDS = ("hydra-core", "omegaconf", "rich", "cloudpickle", "psutil", "torchmetrics")


@dataclass(frozen=True)
class Library:
    """A library and its tests.

    Attributes:
        version: The version from the package index.
        tests: Files and folders of tests that run a Trainer, in its sources.
        needs: Packages that its tests need.
        options: Further options of pytest.
        data: Files of its sources that its tests would download, each with its place in the installed package.
        made: The name of a function of `made_data`, which writes further such files into its sources.
    """

    version: str
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = field(default=())
    data: tuple[tuple[str, str], ...] = ()
    made: str = ""


LIBRARIES = {
    "scvi-tools": Library("1.4.2", ("tests/train", "tests/model", "tests/external", "tests/dataloaders")),
    "gluonts": Library(
        "0.17.0",
        ("test/torch/model", "test/torch/test_torch_item_id_info.py"),
        needs=("flask", "scipy"),
    ),
    "chemprop": Library("2.3.1", ("tests/unit", "tests/integration", "tests/cli")),
    "pytorch-forecasting": Library(
        "1.8.0",
        ("tests/test_models",),
        needs=("pyarrow",),
        data=(("examples/data/stallion.parquet", "pytorch_forecasting/data/stallion.parquet"),),
    ),
    "pytorch-tabular": Library(
        "1.2.0",
        ("tests",),
        needs=("requests",),
        # Without stacking, which needs pytorch-tabnet. Of 3072 regressions, which differ in how columns are prepared,
        # those with the first of some choices.
        options=("-k", "not stacking and not (categorical_embedding and test_regression and (yeo-johnson or False))"),
        made="write_tables",
    ),
    "lightly": Library("1.5.26", ("tests/utils",), needs=(TORCHVISION, "pytest-mock")),
    "neuralforecast": Library(
        "3.3.0",
        ("tests/test_models", "tests/test_losses"),
        needs=("polars", "matplotlib", "pandas<3"),
        options=("-k", "not auto"),  # searches, most in processes of Ray
    ),
    "anomalib": Library(
        "2.7.0",
        ("tests/unit/engine", "tests/unit/utils", "tests/integration/test_task_types.py", "tests/integration/model"),
        needs=(TORCHVISION, "pytest-mock", "pyarrow"),
        # Of the models, those without weights to download; without export to other formats.
        options=("-k", "not TestAPI or ((ganomaly or draem) and not export)"),
    ),
    "darts": Library(
        "0.46.1",
        # Those of probabilistic and global models download data sets when they are imported.
        (
            "darts/tests/models/forecasting/test_ptl_trainer.py",
            "darts/tests/models/forecasting/test_RNN.py",
            "darts/tests/models/forecasting/test_TFT.py",
            "darts/tests/models/forecasting/test_tide_model.py",
            "darts/tests/models/forecasting/test_ensemble_models.py",
            "darts/tests/models/forecasting/test_nbeats_nhits.py",
            "darts/tests/models/forecasting/test_tsmixer.py",
            "darts/tests/models/forecasting/test_TCN.py",
            "darts/tests/models/forecasting/test_block_RNN.py",
            "darts/tests/models/forecasting/test_dlinear_nlinear.py",
            "darts/tests/models/forecasting/test_transformer_model.py",
            "darts/tests/models/forecasting/test_torch_forecasting_model.py",
        ),
        needs=("pandas<3",),
    ),
}


def make_environment(name: str, folder: Path, sources: Path) -> Path:
    """Return the Python of a library's environment; make it first if it is not there.

    Args:
        name: The library.
        folder: The folder of all environments.
        sources: The folder of all sources.
    """
    library = LIBRARIES[name]
    environment = folder / name
    python = environment / "bin" / "python"
    ready = environment / f".ready-{library.version}"
    if not ready.exists():
        if not python.exists():
            subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, str(environment)], check=True)
        packages = [TORCH, LIGHTNING, "pytest", "pytest-timeout", f"{name}=={library.version}", *library.needs]
        install = ["uv", "pip", "install", "--quiet", "--python", str(python), *packages, *OWN_NEEDS]
        subprocess.run(install, check=True)
        (packages_folder,) = environment.glob("lib/python*/site-packages")
        for source, place in library.data:
            shutil.copyfile(sources / name / source, packages_folder / place)
        if TORCHVISION in library.needs:
            shutil.copytree(HERE / "torchvision_operators", packages_folder, dirs_exist_ok=True)
        if library.made:
            write = f"import made_data, pathlib; made_data.{library.made}(pathlib.Path({str(sources / name)!r}))"
            subprocess.run([str(python), "-c", write], check=True, env={**os.environ, "PYTHONPATH": str(HERE)})
        ready.touch()
    return python


def run_tests(
    name: str, python: Path, trainer: str, record: Path, arguments: argparse.Namespace, only: list[str] | None = None
) -> str:
    """Run a library's tests, and write the record.

    Args:
        name: The library.
        python: The Python of its environment.
        trainer: "lightning" or "equipoise".
        record: The file to write.
        arguments: The command line's.
        only: The tests to run; None: all of the library's that may run a Trainer.

    Returns:
        "" or the reason why the run did not end.
    """
    library = LIBRARIES[name]
    record.unlink(missing_ok=True)
    record.parent.mkdir(parents=True, exist_ok=True)
    folder = arguments.sources / name
    chosen = list(library.tests)
    if only is not None:
        listed = record.with_suffix(".args")
        listed.write_text("\n".join(only) + "\n", encoding="utf-8")
        chosen = [f"@{listed}"]
    command = [
        *(str(python), "-m", "pytest", "-q", "-p", "client_trainer", "-p", "no:cacheprovider", "-o", "addopts="),
        *("--timeout", str(arguments.test_limit), "--continue-on-collection-errors", "-W", "ignore"),
        *(*library.options, *chosen),
    ]
    environment = {
        **os.environ,
        "CLIENT_TRAINER": trainer,
        "CLIENT_RECORD": str(record),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        "MPLBACKEND": "agg",
        "CUDA_VISIBLE_DEVICES": "",
    }
    log = record.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(timeout=60 * arguments.limit)
        except subprocess.TimeoutExpired:
            process.kill()  # Lightning's Trainer continues after SIGTERM
            process.wait()
            return f"ended after {arguments.limit:g} minutes"
    return ""


def read_record(record: Path) -> dict[str, dict[str, Any]]:
    """Return the worst outcome of each test."""
    outcomes: dict[str, dict[str, Any]] = {}
    if not record.exists():
        return outcomes
    for text in record.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        earlier = outcomes.get(line["test"])
        if earlier is None or earlier["outcome"] == "passed":
            outcomes[line["test"]] = line
    return outcomes


def compare(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one library under both Trainers; return its row of the table."""
    python = make_environment(name, arguments.environments, arguments.sources)
    theirs = arguments.records / f"{name}-lightning.jsonl"
    ours = arguments.records / f"{name}-equipoise.jsonl"
    notes = []
    if not (arguments.reuse and theirs.exists()):
        notes.append(run_tests(name, python, "lightning", theirs, arguments))
    listed = [test for test, line in read_record(theirs).items() if line["ran"] and line["outcome"] == "passed"]
    if listed:
        notes.append(run_tests(name, python, "equipoise", ours, arguments, only=listed))
    else:
        notes.append(f"no test trains and passes with Lightning's Trainer: see {theirs.with_suffix('.log')}")
    outcomes = read_record(ours)
    passed = [test for test in listed if outcomes.get(test, {}).get("outcome") == "passed"]
    failed = {test: outcomes[test]["error"] for test in listed if outcomes.get(test, {}).get("outcome") == "failed"}
    return {
        "library": f"{name} {LIBRARIES[name].version}",
        "listed": len(listed),
        "passed": len(passed),
        "failed": failed,
        "not run": len(listed) - len(passed) - len(failed),
        "notes": [note for note in notes if note],
    }


def print_row(row: dict[str, Any], seconds: float) -> None:
    """Print the result of one library, and the tests that failed with the last line of their errors."""
    print(
        f"{row['library']}: {row['passed']} of {row['listed']} pass, {row['not run']} not run, {seconds:.0f} s",
        flush=True,
    )
    for test, error in row["failed"].items():
        last_line = (error.strip().splitlines() or [""])[-1]
        print(f"  {test}\n    {last_line}", flush=True)
    for note in row["notes"]:
        print(f"  {note}", flush=True)


def main() -> int:
    """Compare the chosen libraries, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, help="a folder with each library's sources")
    parser.add_argument("--environments", type=Path, default=Path("outputs/clients/environments"))
    parser.add_argument("--records", type=Path, default=Path("outputs/clients/records"))
    parser.add_argument("--libraries", nargs="+", choices=sorted(LIBRARIES), default=list(LIBRARIES))
    parser.add_argument(
        "--limit", type=float, default=20.0, help="minutes for one library and one Trainer (default: 20)"
    )
    parser.add_argument("--test-limit", type=int, default=180, help="seconds for one test (default: 180)")
    parser.add_argument("--reuse", action="store_true", help="keep records of runs with Lightning's Trainer")
    arguments = parser.parse_args()
    for name in ("sources", "environments", "records"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    for name in arguments.libraries:
        if not (arguments.sources / name).is_dir():
            parser.error(f"there is no folder {arguments.sources / name} with the sources of {name}")
    rows = []
    for name in arguments.libraries:
        began = time.monotonic()
        row = compare(name, arguments)
        rows.append(row)
        print_row(row, time.monotonic() - began)
    print("\n| library | tests that train and pass with Lightning's Trainer | pass with ours |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {row['library']} | {row['listed']} | {row['passed']} |")
    (arguments.records / "summary.json").write_text(json.dumps(rows, indent=2), encoding="utf-8")
    return int(any(row["passed"] != row["listed"] or not row["listed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
