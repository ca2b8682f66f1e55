"""Sections of the report that other packages add by entry points.

[project.entry-points."equipoise.report_sections"]
weather = "my_package.report:section"
"""

from collections.abc import Sequence
from typing import Any

from equipoise.errors import ConfigurationError
from equipoise.extensions.report.page.record import ReportSection
from equipoise.names.extensions import load_extension, names_of_extensions
from equipoise.notices import rank_zero_warn

__all__ = ["added_sections"]

_GROUP = "report_sections"


def added_sections(trainer: Any, module: Any) -> Sequence[ReportSection]:
    """Return the sections of all installed packages that have one for this run.

    A section that fails is left out with a warning.
    """
    sections = []
    for name in names_of_extensions(_GROUP):
        try:
            section = load_extension(_GROUP, name)(trainer, module)
            if section is not None:
                sections.append(_as_text(section))
        except Exception as error:
            rank_zero_warn(f"The report lacks the section {name!r}: {type(error).__name__}: {error}")
    return sections


def _as_text(section: Any) -> ReportSection:
    """Return a section whose parts are text and numbers, so that the page can draw it.

    Raises:
        ConfigurationError: If it is no section, or the rows of its table differ in length.
    """
    if not isinstance(section, ReportSection):
        raise ConfigurationError(
            f"Its function must return an equipoise.extensions.report.ReportSection or None, not {section!r}."
        )
    table = [[str(cell) for cell in row] for row in section.table]
    lengths = {len(row) for row in table}
    if len(lengths) > 1:
        raise ConfigurationError(f"All rows of its table must have as many cells as the first, not {sorted(lengths)}.")
    lines = {}
    for name, points in section.lines.items():
        lines[str(name)] = [(float(x), float(y)) for x, y in points]
    images = {str(name): bytes(image) for name, image in section.images.items()}
    return ReportSection(str(section.title), str(section.text), table, lines, images, bool(section.row_heads))
