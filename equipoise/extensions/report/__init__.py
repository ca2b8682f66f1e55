"""The report and the summary of a run: callbacks that collect it, and the page that shows it."""

from typing import TYPE_CHECKING

from equipoise.names.public import lazy_dir, lazy_getattr, names_of

if TYPE_CHECKING:
    from equipoise.extensions.report.page.page import render_report as render_report
    from equipoise.extensions.report.page.page import write_report as write_report
    from equipoise.extensions.report.page.record import ReportSection as ReportSection
    from equipoise.extensions.report.page.record import RunRecord as RunRecord
    from equipoise.extensions.report.run_report import RunReport as RunReport
    from equipoise.extensions.report.run_summary import RunSummary as RunSummary
else:
    __getattr__ = lazy_getattr(__name__)
    __dir__ = lazy_dir(__name__)

__all__ = names_of(__name__)
