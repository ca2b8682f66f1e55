"""The section of the report with the images that were logged: samples, confusion matrices, figures."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger

from equipoise.extensions.report.page.record import ReportSection
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.remote.paths import is_remote

__all__ = ["section"]

_MOST_IMAGES = 12
# Of one image, and of all, so that the page stays small.
_MOST_BYTES = 300_000
_MOST_BYTES_OF_ALL = 1_000_000
# Bytes. Files of events that are larger are not searched at the end of a run.
_LARGEST = 2**28


def section(trainer: Any, module: Any) -> ReportSection | None:
    """Return a section with the last image of each name; None if none was logged.

    Images are those that `TensorBoardLogger.experiment` received by `add_image` or `add_figure`, as its package reads
    them.
    """
    images: dict[str, bytes] = {}
    left_out = 0
    size = 0
    for name, image in _logged_images(trainer):
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


def _logged_images(trainer: Any) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the last image of each name, of all loggers of TensorBoard."""
    for logger in trainer.loggers:
        if not is_a(logger, TensorBoardLogger) or is_remote(logger.log_dir):
            continue
        folder = Path(logger.log_dir)
        files = list(folder.glob("events.out.tfevents.*"))
        if not files or sum(file.stat().st_size for file in files) > _LARGEST:
            continue
        # Values that were logged wait in memory.
        logger.experiment.flush()
        from tensorboard.backend.event_processing.event_accumulator import IMAGES, EventAccumulator

        events = EventAccumulator(str(folder), size_guidance={IMAGES: 1})
        events.Reload()
        for name in events.Tags()[IMAGES]:
            last = events.Images(name)[-1]
            yield name, last.encoded_image_string
