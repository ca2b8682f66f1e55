"""`equipoise verify`: compute the first steps of the configured run, and on one device, and print how they compare."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn

from equipoise.app.batch_size import check_has_number
from equipoise.app.build import build_trainer
from equipoise.app.command import present, read_flags, whole_number
from equipoise.app.compose import compose_values
from equipoise.app.config.checks import import_paths
from equipoise.app.torchrun import check_runs_here
from equipoise.extensions.common.bench import build_data_and_module
from equipoise.extensions.verification.findings import KINDS, Finding
from equipoise.extensions.verification.verification import Verification, verify
from equipoise.tables.whole_table import print_table
from equipoise.trainer.runtime.request import Request

__all__ = ["show_verification"]

_STEPS = 3
_TAKES = "equipoise verify takes overrides, --steps=N and --json"


def show_verification(arguments: Sequence[str], folders: Sequence[Path]) -> int:
    """Run the command.

    Args:
        arguments: Overrides as for `fit`; `--steps=N`, the number of optimiser steps; `--json`.
        folders: The folders with configurations, the one with the primary `config.yaml` first.

    Returns:
        The exit code: 1 if the steps are not those of one device.

    Raises:
        ConfigurationError: If an argument or the configuration is wrong.
    """
    # 1. The arguments and the objects; callbacks write nothing here.
    overrides, flags = read_flags(arguments, {"--steps": whole_number, "--json": present}, _TAKES)
    with tempfile.TemporaryDirectory(prefix="equipoise-verify-") as temporary, import_paths(folders):
        values = compose_values(overrides, folders, Path(temporary, "run"))
        check_runs_here(values, "equipoise verify")
        check_has_number(values, "equipoise verify")
        data, module = build_data_and_module(values)
        values["logger"] = {}
        values["trainer"]["default_root_dir"] = temporary
        trainer = build_trainer(values)
        request = Request(TrainerFn.FITTING, module, datamodule=data)
        # The trainers of both runs are made as this one is.
        result = verify(trainer, type(trainer), request, flags.get("--steps", _STEPS))
    # 2. The results.
    if "--json" in flags:
        content = {"equal": result.difference is None, "sentence": result.sentence, "rows": _rows(result)}
        print(json.dumps(content))
    else:
        _print(result)
    return int(result.difference is not None)


def _rows(result: Verification) -> list[dict[str, Any]]:
    """Return a row for each kind of values, with the largest of its differences."""
    rows = []
    for kind in KINDS:
        findings = [finding for finding in result.findings if finding.kind == kind]
        if not findings:
            continue
        worst = max(findings, key=lambda finding: finding.gap.excess)
        rows.append(
            {
                "of": kind,
                "compared": len(findings),
                "differ": sum(map(_differs, findings)),
                "largest difference": worst.gap.share,
                "at": f"step {worst.step} {worst.name}" if worst.gap.share else "",
                "verdict": _verdict(worst),
            }
        )
    return rows


def _differs(finding: Finding) -> bool:
    return bool(finding.gap)


def _verdict(worst: Finding) -> str:
    if not worst.gap.share:
        return "equal to the bit"
    if worst.gap:
        return "differs"
    return f"equal: {worst.gap.excess:.0e} of what rounding may cause"


def _print(result: Verification) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = _rows(result)
    if rows:
        table = Table(box=SIMPLE_HEAD, header_style="bold")
        for head in rows[0]:
            table.add_column(head, overflow="fold")
        for row in rows:
            shown = {**row, "largest difference": f"{row['largest difference']:.1e}"}
            table.add_row(*map(str, shown.values()))
        print_table(table)
    print(result.sentence)
