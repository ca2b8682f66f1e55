"""Runs public programs with Lightning's Trainer and with ours, on one device and on several, and compares them.

    python benchmarks/clients/programs/main.py --sources FOLDER --data FOLDER [--programs gan] [--limit MINUTES]

No program is changed: before it runs, the class `Trainer` in the modules of Lightning is exchanged, and with it the
arguments that name devices and bound the run. On one device weights and logged values must equal Lightning's to the
bit. On two devices of the CPU the program must end with finite weights; how far they are from those of one device is
shown.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import write_graphs, write_mnist, write_networks, write_sentences
from programs import PROGRAMS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# Errors of ours that state a rule and a remedy.
REFUSALS = ("ConfigurationError", "StepError")
BATCH_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
STRATEGIES = ("single_device", "dp", "ddp", "fsdp", "pipeline")


@dataclass
class Outcome:
    """Records and error of one run of a program.

    Attributes:
        runs: A record for each Trainer of the program.
        error: "" or the error that ended it.
        seconds: How long it ran.
    """

    runs: list[dict[str, Any]]
    error: str
    seconds: float


def run(name: str, kind: str, strategies: list[str], arguments: argparse.Namespace) -> dict[str, Outcome]:
    """Run a program under each strategy, in one process of its own, in a folder with its data.

    Args:
        name: The program.
        kind: "lightning" or "equipoise".
        strategies: The strategies; all but "single_device" get two devices.
        arguments: The command line's.

    Returns:
        The outcome of each strategy.
    """
    program = PROGRAMS[name]
    folder = arguments.records / f"{name}-{kind}"
    prepare(folder, arguments)
    records = {strategy: folder / f"{strategy}.pt" for strategy in strategies}
    content = {
        "program": str(arguments.sources / program.repository / program.file),
        "command": program.command,
        "trainer": kind,
        "runs": [({**program.arguments, **places(strategy)}, str(record)) for strategy, record in records.items()],
        "stand_ins": program.stand_ins,
        "hidden": program.hidden if kind == "lightning" else (),
    }
    settings = folder / "settings.json"
    settings.write_text(json.dumps(content), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    if kind == "lightning":
        # Since 2.6 it refuses checkpoints with objects in them, such as those of the template.
        environment["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    command = [sys.executable, str(HERE / "run_program.py"), str(settings)]
    with (arguments.records / f"{name}-{kind}.log").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            process.wait(timeout=60 * arguments.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return {strategy: outcome_of(record) for strategy, record in records.items()}


def places(strategy: str) -> dict[str, Any]:
    """Return the arguments of a Trainer that choose a strategy and its devices."""
    if strategy == "single_device":
        return {"accelerator": "cpu", "devices": 1, "strategy": "auto"}
    return {"accelerator": "cpu", "devices": 2, "strategy": strategy}


def outcome_of(record: Path) -> Outcome:
    """Read the record of one run."""
    if not record.exists():
        return Outcome([], "no record: the process ended before", 0.0)
    return Outcome(**torch.load(record))


def prepare(folder: Path, arguments: argparse.Namespace) -> None:
    """Link the data of all programs, which is written once, into the folder of one run."""
    common = arguments.records / "data-of-all"
    if not common.exists():
        write_mnist(arguments.data / "mnist", common / "data")
        write_graphs(common / "data" / "TUDataset")
        write_sentences(common / "glue")
        write_networks(common)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in common.iterdir():
        (folder / path.name).symlink_to(path)


def distance(ours: Outcome, theirs: Outcome) -> float:
    """Return the largest difference of a weight, without BatchNorm's statistics; NaN if the runs have other weights."""
    largest = 0.0
    if len(ours.runs) != len(theirs.runs):
        return math.nan
    for one, other in zip(ours.runs, theirs.runs, strict=True):
        if one["weights"].keys() != other["weights"].keys():
            return math.nan
        for name, value in one["weights"].items():
            if name.endswith(BATCH_STATISTICS):
                continue
            difference = (value.double() - other["weights"][name].double()).abs()
            largest = max(largest, float(difference.max())) if difference.numel() else largest
    return largest


def is_equal(ours: Outcome, theirs: Outcome) -> bool:
    """Tell if weights, logged values and steps are the same to the bit."""
    if len(ours.runs) != len(theirs.runs):
        return False
    for one, other in zip(ours.runs, theirs.runs, strict=True):
        if one["step"] != other["step"]:
            return False
        for kind in ("weights", "values"):
            if one[kind].keys() != other[kind].keys():
                return False
            if any(not torch.equal(value, other[kind][name]) for name, value in one[kind].items()):
                return False
    return True


def is_finite(outcome: Outcome) -> bool:
    """Tell if all weights are finite."""
    return all(bool(torch.isfinite(value).all()) for run in outcome.runs for value in run["weights"].values())


def cell(ours: Outcome, theirs: Outcome, strategy: str) -> tuple[str, bool]:
    """Return what the table shows of a run, and if it is as promised."""
    if ours.error.startswith(REFUSALS):
        return "refused", strategy != "single_device"
    if ours.error:
        return "error", False
    if strategy == "single_device":
        if is_equal(ours, theirs):
            return "equal", True
        return f"differs by {distance(ours, theirs):.1e}", False
    if not is_finite(ours):
        return "not finite", False
    return f"runs; {distance(ours, theirs):.1e}", True


def main() -> int:
    """Run the chosen programs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, required=True, help="a folder with each repository's checkout")
    parser.add_argument("--data", type=Path, required=True, help="a folder with MNIST's four files in its mnist/")
    parser.add_argument("--records", type=Path, default=Path("outputs/clients/programs"))
    parser.add_argument("--programs", nargs="+", choices=sorted(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--limit", type=float, default=10.0, help="minutes for a program and a Trainer (default: 10)")
    arguments = parser.parse_args()
    for name in ("sources", "data", "records"):
        setattr(arguments, name, getattr(arguments, name).resolve())
    arguments.records.mkdir(parents=True, exist_ok=True)
    lines = []
    kept = True
    for name in arguments.programs:
        theirs = run(name, "lightning", ["single_device"], arguments)["single_device"]
        if theirs.error:
            print(f"{name}: Lightning's Trainer: {theirs.error[:2000]}", flush=True)
        cells = []
        for strategy, ours in run(name, "equipoise", arguments.strategies, arguments).items():
            text, good = cell(ours, theirs, strategy)
            kept = kept and good
            cells.append(text)
            print(f"{name}, {strategy}: {text}, {ours.seconds:.0f} s {ours.error[:2000]}", flush=True)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    print(f"\n| program | {' | '.join(arguments.strategies)} |\n|{' --- |' * (1 + len(arguments.strategies))}")
    print("\n".join(lines))
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())
