"""Learning curves as a picture by matplotlib, `curves.png`.

matplotlib is optional, and only its objects are used: nothing of a notebook's or a script's own figures is touched.
"""

import math
import re
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

from equipoise.formats import format_number

__all__ = ["can_draw", "draw_curves", "group_curves", "split_name"]

Curve = Mapping[float, float]

# Words in the names of metrics, and the run stage that they mean.
_STAGES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val"}
_LONG = {"acc": "accuracy"}
# Axes in one picture, and epochs of which the end is marked.
_MOST_AXES = 12
_MOST_EPOCHS = 5
# Points of a line up to which each has a marker.
_FEW_POINTS = 30
_INK = "#333333"
_FAINT = "#d9dce1"
_COLOURS = {"train": "#8a94a6", "val": "#1f6fb2"}
_OTHER_COLOURS = ("#c8643c", "#4f9d69", "#8765a8", "#b39436")


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def split_name(name: str) -> tuple[str, str]:
    """Split a metric's name into the measured quantity and the run stage; the latter may be empty.

    Args:
        name: The name, as it was logged.

    Returns:
        The quantity, and the run stage with the number of the loader.

    Example:
        >>> split_name("val_acc"), split_name("train/loss_epoch"), split_name("lr-Adam")
        (('accuracy', 'val'), ('loss', 'train'), ('lr-Adam', ''))
    """
    # 1. Remove the suffixes that the trainer adds.
    name, _, loader = name.partition("/dataloader_idx_")
    name = re.sub(r"(?<=.)[/_.-](epoch|step)$", "", name)
    # 2. Take out the first word that names a run stage.
    words = re.split(r"[/_.\s-]+", name)
    stage_word = None
    for word in words:
        if word.lower() in _STAGES:
            stage_word = word
            break
    if stage_word is not None and len(words) > 1:
        words.remove(stage_word)
        name = " ".join(filter(None, words)) or name
    # 3. Put run stage and loader together.
    run_stage = []
    if stage_word is not None:
        run_stage.append(_STAGES[stage_word.lower()])
    if loader:
        run_stage.append(loader)
    return _LONG.get(name.lower(), name), " ".join(run_stage)


def draw_curves(curves: Mapping[str, Curve], path: Path, *, epoch_ends: Mapping[int, int] | None = None) -> None:
    """Draw learning curves into a PNG file; curves without a finite value are left out.

    Args:
        curves: For every metric's name its values, by steps.
        path: The file. Its folder is created if need be.
        epoch_ends: The last step of each epoch, by epochs done. Default: no epoch is marked.

    Raises:
        ImportError: If matplotlib is not installed.
        OSError: If the file cannot be written.

    Example:
        >>> curves = {"train_loss": {49: 0.9, 99: 0.5}, "val_loss": {99: 0.7}}
        >>> draw_curves(curves, Path("curves.png"))  # doctest: +SKIP
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # 1. Choose the curves and the grid of axes.
    families = group_curves(_finite_curves(curves))
    drawn = dict(list(families.items())[:_MOST_AXES])
    columns = _number_of_columns(len(drawn))
    rows = math.ceil(len(drawn) / columns)
    # 2. Create a figure with a canvas of its own, without pyplot.
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, wspace=0.03, hspace=0.05)
    width = max(5.2, 4.4 * columns)
    figure = Figure(
        figsize=(width, 3.2 * rows),
        dpi=150,
        layout=layout,
        facecolor="white",
    )
    FigureCanvasAgg(figure)
    # 3. Draw; only the lowest axes name their unit.
    for index, (family, members) in enumerate(drawn.items()):
        axes = figure.add_subplot(
            rows,
            columns,
            index + 1,
        )
        _draw_family(axes, family, members)
        _draw_epochs(axes, epoch_ends or {})
        if index >= len(drawn) - columns:
            axes.set_xlabel("step", color=_INK, fontsize=9)
    if len(families) > len(drawn):
        figure.supxlabel(
            f"{len(drawn)} of {len(families)} metrics",
            color=_INK,
            fontsize=9,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _finite_curves(curves: Mapping[str, Curve]) -> dict[str, Curve]:
    """Return the finite values of each curve; leave out curves without any."""
    finite_curves: dict[str, Curve] = {}
    for name, curve in curves.items():
        finite = {step: value for step, value in curve.items() if math.isfinite(value)}
        if finite:
            finite_curves[name] = finite
    return finite_curves


def _number_of_columns(number_of_axes: int) -> int:
    # Four axes look better as a square than as three and one.
    if number_of_axes == 4:
        return 2
    return min(number_of_axes, 3)


def group_curves(curves: Mapping[str, Curve]) -> dict[str, dict[str, Curve]]:
    """Group curves by quantity, then by run stage: losses first, then quantities with several curves.

    Args:
        curves: For every metric's name its values, by steps.

    Example:
        >>> group_curves({"acc": {1: 0.5}, "train_loss": {1: 0.9}, "val_loss": {1: 1.0}})
        {'loss': {'train': {1: 0.9}, 'val': {1: 1.0}}, 'accuracy': {'': {1: 0.5}}}
    """
    families: dict[str, dict[str, Curve]] = {}
    for name, curve in curves.items():
        family, run_stage = split_name(name)
        if _has_steps(name, curves):
            run_stage = f"{run_stage} (epoch)".strip()
        members = families.setdefault(family, {})
        # Two metrics of one meaning, such as "val_acc" and "val_accuracy", keep their names.
        if run_stage in members:
            members[name] = curve
        else:
            members[run_stage] = curve

    def rank(family: str) -> tuple[bool, bool]:
        is_loss = "loss" in family.lower()
        is_single = len(families[family]) == 1
        return not is_loss, is_single

    return {family: families[family] for family in sorted(families, key=rank)}


def _has_steps(name: str, curves: Mapping[str, Curve]) -> bool:
    """Return whether a curve holds values of epochs and another one those of steps: `loss` and `loss_step`."""
    base, mark, loader = name.partition("/dataloader_idx_")
    return f"{base}_step{mark}{loader}" in curves


def _draw_family(axes: Any, family: str, members: Mapping[str, Curve]) -> None:
    """Draw the curves of one quantity."""
    spare_colours = cycle(_OTHER_COLOURS)
    values: list[float] = []
    # Training lies below: where the two meet, validation is what one looks for.
    for run_stage in sorted(members, key=lambda run_stage: run_stage != "train"):
        if run_stage in _COLOURS:
            colour = _COLOURS[run_stage]
        elif len(members) == 1:
            colour = _COLOURS["val"]
        else:
            colour = next(spare_colours)
        _draw_curve(
            axes,
            run_stage,
            members[run_stage],
            colour,
        )
        values += members[run_stage].values()
    _style(axes, family, values)


def _draw_curve(axes: Any, run_stage: str, curve: Curve, colour: str) -> None:
    """Draw a line with its last value in the legend and a larger marker at its end."""
    steps = sorted(curve)
    values = [curve[step] for step in steps]
    last_value = format_number(values[-1])
    marker_size = 0.0
    if len(steps) <= _FEW_POINTS:
        marker_size = 3.5
    axes.plot(
        steps,
        values,
        color=colour,
        label=f"{run_stage}  {last_value}".strip(),
        linewidth=1.8,
        marker="o",
        markersize=marker_size,
    )
    axes.plot(
        steps[-1:],
        values[-1:],
        color=colour,
        marker="o",
        markersize=5,
    )


def _draw_epochs(axes: Any, epoch_ends: Mapping[int, int]) -> None:
    """Mark where epochs end by a faint line and a number above; of many epochs, some."""
    low, high = axes.get_xlim()
    visible = [(epoch, step) for epoch, step in epoch_ends.items() if low <= step <= high]
    stride = max(1, math.ceil(len(visible) / _MOST_EPOCHS))
    for epoch, step in visible[stride - 1 :: stride]:
        axes.axvline(
            step,
            color=_FAINT,
            linewidth=0.7,
            linestyle=(0, (4, 4)),
            zorder=0,
        )
        axes.annotate(
            f"epoch {epoch:,}",
            (step, 1.0),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=7,
            color=_INK,
        )


def _style(axes: Any, family: str, values: list[float]) -> None:
    """Style the axes without a frame, with thin lines and whole steps."""
    from matplotlib.ticker import MaxNLocator

    is_loss = "loss" in family.lower()
    if is_loss and min(values) > 0 and max(values) > 100 * min(values):
        axes.set_yscale("log")
    axes.set_title(
        family,
        loc="left",
        color=_INK,
        fontsize=11,
        fontweight="bold",
        pad=14,
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.grid(
        axis="y",
        color=_FAINT,
        linewidth=0.7,
    )
    axes.set_axisbelow(True)
    axes.tick_params(
        colors=_INK,
        labelsize=8.5,
        length=0,
    )
    axes.margins(x=0.03)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.legend(
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
        loc="best",
        handlelength=1.2,
    )
