"""Records of a run for its report, and holders of memory, with values for what a test does not name."""

from datetime import datetime, timedelta
from typing import Any

from equipoise.extensions.report.page.page import render_report
from equipoise.extensions.report.page.record import RunRecord
from equipoise.memory.records import Composition, TensorRecord
from tests.extensions.common.page.parsing import Element, parse

__all__ = ["composition", "holder", "page", "record"]

START = datetime(2026, 3, 14, 9, 26, 53)


def record(**given: Any) -> RunRecord:
    return RunRecord(**{"title": "Net", "started": START, "finished": START + timedelta(minutes=90), **given})


def page(**given: Any) -> Element:
    """The page of such a record, taken apart."""
    return parse(render_report(record(**given)))


def holder(module: str, nbytes: int, **given: Any) -> TensorRecord:
    values = {"category": "activation", "name": "linear", "shape": (2, 3), "dtype": "float32", **given}
    return TensorRecord(module=module, nbytes=nbytes, **values)


def composition(*holders: TensorRecord, device: str = "cuda:0") -> Composition:
    total = sum(each.nbytes for each in holders)
    return Composition(step=7, phase="backward", device=device, nbytes=total, holders=holders)
