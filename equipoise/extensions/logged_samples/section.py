"""The section of the report with what was logged beside numbers: samples, confusion matrices, histograms."""

from typing import Any

from equipoise.extensions.logged_samples.tensorboard_samples import logged_samples
from equipoise.extensions.report.page.record import ReportSection

__all__ = ["section"]

_MOST_IMAGES = 12
_MOST_TEXTS = 24
_LONGEST_TEXT = 2000
# Of one image, and of all, so that the page stays small.
_MOST_BYTES = 300_000
_MOST_BYTES_OF_ALL = 1_000_000


def section(trainer: Any, module: Any) -> ReportSection | None:
    """Return a section with the last image, text and histogram of each name; None if none was logged.

    They are those that `TensorBoardLogger.experiment` received by `add_image`, `add_figure`, `add_text` or
    `add_histogram`, as its package reads them.
    """
    images: dict[str, bytes] = {}
    texts: dict[str, str] = {}
    left_out = 0
    size = 0
    for name, content in logged_samples(trainer):
        if isinstance(content, str):
            if len(texts) == _MOST_TEXTS or len(content) > _LONGEST_TEXT:
                left_out += 1
            else:
                texts.setdefault(name, content)
            continue
        if name in images:
            continue
        if len(images) == _MOST_IMAGES or len(content) > _MOST_BYTES or size + len(content) > _MOST_BYTES_OF_ALL:
            left_out += 1
            continue
        images[name] = content
        size += len(content)
    if not images and not left_out and not texts:
        return None
    words = "The last of each name."
    if left_out:
        words += f" Too many or too large for this page: {left_out}; TensorBoard shows them."
    rows = list(texts.items())
    if rows:
        rows.insert(0, ("Name", "Content"))
    return ReportSection("Samples", words, table=rows, images=images, row_heads=True)
