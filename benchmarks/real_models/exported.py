"""Trains the models of the campaign by torch.export in the place of the pipeline's recorder, and compares both.

python benchmarks/real_models/exported.py                        all models, an hour and more
python benchmarks/real_models/exported.py --only bert resnet18   some models, by their names
python benchmarks/real_models/exported.py --table table.md       the table, from the records alone
"""

import argparse
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from catalogue import Model
from libraries import absence
from main import MOST, MOST_IN_SINGLE_PRECISION, SECTIONS
from model_export import judge

# Processes and records.


def run(section: str, model: Model, records: Path, limit: float) -> None:
    """Judges a model in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(section, model, records))
    start = time.monotonic()
    process.start()
    process.join(limit)
    ended = not process.is_alive()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()
    seconds = time.monotonic() - start
    _write(records, section, model, ended=ended, exit_code=process.exitcode, seconds_in_all=seconds)


def _in_child(section: str, model: Model, records: Path) -> None:
    os.setsid()
    output = os.open(records.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "equipoise", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    judge(model, partial(_write, records, section, model))


def _write(records: Path, section: str, model: Model, /, **found: Any) -> None:
    with records.open("a") as file:
        file.write(json.dumps({"section": section, "model": model.name, **found}) + "\n")


def read(records: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what is known of each model, by its section and its name. A later line counts more than an earlier one."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if records.exists():
        for line in records.read_text().splitlines():
            found = json.loads(line)
            rows.setdefault((found["section"], found["model"]), {}).update(found)
    return rows


def is_equal(row: dict[str, Any]) -> bool:
    """Return whether training by torch.export has ended as by the forward, in the same batches, within the bound."""
    deviations = row.get("deviations", {})
    most = MOST_IN_SINGLE_PRECISION if row.get("single_precision") else MOST
    in_micro_batches = row.get("micro_batches_by_both", deviations.get("micro-batches", float("inf")))
    return max(deviations.get("whole", float("inf")), in_micro_batches) <= most


def is_equal_by(row: dict[str, Any], way: str) -> bool:
    """Return whether training in a pipeline has ended so: "pipeline", as it is; "stack", without its recorder."""
    most = MOST_IN_SINGLE_PRECISION if row.get("single_precision") else MOST
    return row.get(way, {}).get("deviation", float("inf")) <= most


# Tables.

COLUMNS = (
    *("model", "exported", "outputs", "whole batches", "micro-batches", "in submodules", "second half", "gradients"),
    *("seconds", "pipeline", "its weights", "recordings", "of seconds", "stack alone"),
)


def cells(row: dict[str, Any]) -> list[str]:
    """The line of a model."""
    way = "refused"
    if "any_size" in row:
        way = "any size" if row["any_size"] else "one size each"
    deviations, today, cut = row.get("deviations", {}), row.get("pipeline", {}), row.get("cut", {})
    return [
        row["model"],
        way,
        " ".join(_number(each) for each in row.get("outputs", [])),
        *(_number(deviations.get(name)) for name in ("whole", "micro-batches")),
        f"{row['calls_in_modules']} of {row['calls']}" if "calls" in row else "",
        f"{cut['before']}, {cut['passed']}" if cut else "",
        _number(cut.get("deviation")),
        f"{row['seconds']:.1f}" if "seconds" in row else "",
        today.get("followed_by", "") or "refused",
        _number(today.get("deviation")),
        str(len(today.get("recordings", []))),
        f"{today['recordings'][0]:.2f}" if today.get("recordings") else "",
        _number(row["stack"].get("deviation")) or "refused" if "stack" in row else "",
    ]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.1e}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The tables of all sections, and below them what was refused."""
    lines = []
    for section in SECTIONS:
        those = [row for row in rows if row["section"] == section]
        if those:
            head = [list(COLUMNS), ["---"] * len(COLUMNS)]
            lines += [f"{section}:", "", *(f"| {' | '.join(each)} |" for each in (*head, *map(cells, those))), ""]
    for row in rows:
        # A model that is refused for one size as well is refused for any.
        name = "refused" if "refused" in row else "refused for any size"
        if name in row:
            lines.append(f"- {row['section']}, {row['model']}, {name}: {row[name]}")
        if "micro_batches_by_both" in row:
            by_forward, by_both = row["micro_batches_by_forward"], row["micro_batches_by_both"]
            lines.append(
                f"- {row['section']}, {row['model']}: its own forward in these micro-batches has {by_forward:.1e};"
                f" torch.export deviates from that by {_number(by_both)}"
            )
        if not row.get("ended"):
            lines.append(f"- {row['section']}, {row['model']}: did not end in its time")
        for way in ("pipeline", "stack"):
            for name in ("refused", "failed"):
                if way in row and name in row[way]:
                    lines.append(f"- {row['section']}, {row['model']}, {way} {name}: {row[way][name]}")
    return "\n".join(lines) + "\n"


def arguments(command: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="(default: all)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="models of these names (default: all)")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for a model (default: 120)")
    parser.add_argument("--records", type=Path, default=Path("outputs/exported.jsonl"), help="where results are kept")
    parser.add_argument("--table", type=Path, help="write the tables from the records, and train nothing")
    return parser.parse_args(command)


def main(command: list[str] | None = None) -> int:
    """Runs what has no record yet; returns 1 unless each model trains equally, by torch.export or by the stack."""
    options = arguments(command)
    torch.set_num_threads(1)  # processes are forked, and threads do not survive that
    options.records.parent.mkdir(parents=True, exist_ok=True)
    known = read(options.records)
    for section in [] if options.table else options.sections:
        models = [model for model in SECTIONS[section]() if not options.only or model.name in options.only]
        for model in models:
            if not known.get((section, model.name), {}).get("ended") and not absence(model.library):
                run(section, model, options.records, options.limit)
                print(" | ".join(cells(read(options.records)[section, model.name])), flush=True)
    rows = list(read(options.records).values())
    if options.table:
        options.table.write_text(table(rows))
    unequal = [row["model"] for row in rows if not is_equal(row) and not is_equal_by(row, "stack")]
    print(f"{len(rows) - len(unequal)} of {len(rows)} train equally by export or the stack; not so: {unequal}")
    return int(bool(unequal))


if __name__ == "__main__":
    sys.exit(main())
