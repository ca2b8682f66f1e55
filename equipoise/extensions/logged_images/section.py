"""The section of the report with the images that were logged: samples, confusion matrices, figures."""

from typing import Any

from equipoise.extensions.logged_images.tensorboard_images import logged_images
from equipoise.extensions.report.page.record import ReportSection

__all__ = ["section"]

_MOST_IMAGES = 12
# Of one image, and of all, so that the page stays small.
_MOST_BYTES = 300_000
_MOST_BYTES_OF_ALL = 1_000_000


def section(trainer: Any, module: Any) -> ReportSection | None:
    """Return a section with the last image of each name; None if none was logged.

    Images are those that `TensorBoardLogger.experiment` received by `add_image` or `add_figure`, as its package reads
    them.
    """
    images: dict[str, bytes] = {}
    left_out = 0
    size = 0
    for name, image in logged_images(trainer):
        if name in images:
            continue
        if len(images) == _MOST_IMAGES or len(image) > _MOST_BYTES or size + len(image) > _MOST_BYTES_OF_ALL:
            left_out += 1
            continue
        images[name] = image
        size += len(image)
    if not images and not left_out:
        return None
    text = "The last image of each name."
    if left_out:
        text += f" Too many or too large for this page: {left_out}; TensorBoard shows them."
    return ReportSection("Images", text, images=images)
