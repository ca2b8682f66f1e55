"""Read the images, texts and histograms that loggers of TensorBoard have written."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
from lightning.pytorch.loggers import TensorBoardLogger

from equipoise.formats import counted, format_number
from equipoise.interop.lightning.classes import is_a
from equipoise.interop.remote.paths import is_remote

__all__ = ["logged_samples"]

# Bytes. Files of events that are larger are not searched at the end of a run.
_LARGEST = 2**28
# Columns of a histogram, and their heights.
_COLUMNS = 24
_HEIGHTS = "▁▂▃▄▅▆▇█"


def logged_samples(trainer: Any) -> Iterator[tuple[str, bytes | str]]:
    """Yield name and content of the last image, text and histogram of each name, of all loggers of TensorBoard."""
    for logger in trainer.loggers:
        if not is_a(logger, TensorBoardLogger) or is_remote(logger.log_dir):
            continue
        folder = Path(logger.log_dir)
        files = list(folder.glob("events.out.tfevents.*"))
        if not files or sum(file.stat().st_size for file in files) > _LARGEST:
            continue
        # Values that were logged wait in memory.
        logger.experiment.flush()
        from tensorboard.backend.event_processing.event_accumulator import (
            HISTOGRAMS,
            IMAGES,
            TENSORS,
            EventAccumulator,
        )

        events = EventAccumulator(str(folder), size_guidance={IMAGES: 1, TENSORS: 1, HISTOGRAMS: 1})
        events.Reload()
        for name in events.Tags()[IMAGES]:
            yield name, events.Images(name)[-1].encoded_image_string
        for name in events.Tags()[TENSORS]:
            if events.SummaryMetadata(name).plugin_data.plugin_name == "text":
                content = b"\n".join(events.Tensors(name)[-1].tensor_proto.string_val)
                # The writer of torch adds this to the name.
                yield name.removesuffix("/text_summary"), content.decode(errors="replace")
        for name in events.Tags()[HISTOGRAMS]:
            yield name, _drawn(events.Histograms(name)[-1].histogram_value)


def _drawn(histogram: Any) -> str:
    """Return a histogram in a line: its least value, columns of equal width, its greatest value, the count."""
    least = histogram.min
    greatest = histogram.max
    count = counted(int(histogram.num), "value")
    if least == greatest:
        return f"{format_number(least)} ({count})"
    # Buckets of TensorBoard are the wider, the farther they lie from zero.
    edges = numpy.clip([least, *histogram.bucket_limit], least, greatest)
    below = numpy.cumsum([0.0, *histogram.bucket])
    sizes = numpy.diff(numpy.interp(numpy.linspace(least, greatest, _COLUMNS + 1), edges, below))
    heights = numpy.round(sizes / sizes.max() * (len(_HEIGHTS) - 1)).astype(int)
    columns = "".join(_HEIGHTS[height] for height in heights)
    return f"{format_number(least)} {columns} {format_number(greatest)} ({count})"
