"""compare.html: the record of a comparison, as its page takes it."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import yaml

from equipoise.extensions.comparison.page.page import ComparedStrategy, ComparisonRecord, render_comparison
from equipoise.extensions.comparison.results.comparison import Comparison, Row
from equipoise.extensions.comparison.results.tables import meaning_of_columns, row_texts

__all__ = ["comparison_page"]


def comparison_page(
    comparison: Comparison, recommendation: Mapping[str, Any] | None, configuration: Mapping[str, Any]
) -> str:
    """Return the HTML of compare.html.

    Args:
        comparison: The results.
        recommendation: The recommended row; None if there is none.
        configuration: The configuration of the command.
    """
    # 1. The recommendation.
    chosen = None
    sentences = ""
    overrides = ""
    if recommendation is not None:
        chosen = recommendation["strategy"]
        sentences = f"{chosen}, on this machine. {recommendation['reason']}"
        overrides = " ".join(recommendation["overrides"])
    # 2. The record.
    strategies = [_strategy(row, comparison, is_recommended=row.label == chosen) for row in comparison.rows]
    record = ComparisonRecord(
        title=comparison.title,
        written=datetime.now(),
        outcome=comparison.outcome,
        facts=_facts(comparison),
        strategies=strategies,
        recommendation=sentences,
        overrides=overrides,
        notes=[meaning_of_columns(comparison), *comparison.notes],
        configuration=yaml.safe_dump(dict(configuration), sort_keys=False),
    )
    return render_comparison(record)


def _facts(comparison: Comparison) -> dict[str, str]:
    facts = {"devices": ", ".join(comparison.devices)}
    if comparison.batch_size is not None:
        facts["samples of a step"] = str(comparison.batch_size)
    facts["strategies measured"] = f"{len(comparison.measured)} of {len(comparison.rows)}"
    return facts


def _strategy(row: Row, comparison: Comparison, *, is_recommended: bool) -> ComparedStrategy:
    cells = {"strategy": row.label} | row_texts(row, comparison) | {"overrides": " ".join(row.overrides)}
    return ComparedStrategy(
        label=row.label,
        cells=cells,
        rate=row.samples_per_second,
        peaks=row.peaks,
        predicted=row.predicted or {},
        reason=row.reason,
        is_recommended=is_recommended,
    )
