"""Learning curves as a picture by matplotlib, `curves.png`.

matplotlib is optional, and only its objects are used: nothing of a notebook's or a script's own figures is touched.
"""

import math
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from equipoise.callbacks.progress.display import format_value

__all__ = ["can_draw", "draw_curves", "group_curves", "split_name"]

Curve = Mapping[float, float]

_STAGES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val"}
_LONG = {"acc": "accuracy"}
_MOST = 12  # axes in one picture
_MOST_EPOCHS = 5  # of which the end is marked
_INK, _FAINT = "#333333", "#d9dce1"
_COLOURS = {"train": "#8a94a6", "val": "#1f6fb2"}
_OTHERS = ("#c8643c", "#4f9d69", "#8765a8", "#b39436")


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def split_name(name: str) -> tuple[str, str]:
    """Splits a metric's name into what is measured and where; the latter is empty if the name does not say.

    Example:
        >>> split_name("val_acc"), split_name("train/loss_epoch"), split_name("lr-Adam")
        (('accuracy', 'val'), ('loss', 'train'), ('lr-Adam', ''))
    """
    name, _, loader = name.partition("/dataloader_idx_")
    name = re.sub(r"(?<=.)[/_.-](epoch|step)$", "", name)
    words = re.split(r"[/_.\s-]+", name)
    stage = next((word for word in words if word.lower() in _STAGES), None)
    if stage is not None and len(words) > 1:
        words.remove(stage)
        name = " ".join(filter(None, words)) or name
    where = ([] if stage is None else [_STAGES[stage.lower()]]) + ([loader] if loader else [])
    return _LONG.get(name.lower(), name), " ".join(where)


def draw_curves(curves: Mapping[str, Curve], path: Path, *, epoch_ends: Mapping[int, int] | None = None) -> None:
    """Draws learning curves into a PNG file; curves with no finite value are left out.

    Args:
        curves: For every metric's name its values, by steps.
        path: The file. Its folder is made if need be.
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

    finite = {name: {x: y for x, y in curve.items() if math.isfinite(y)} for name, curve in curves.items()}
    families = group_curves({name: curve for name, curve in finite.items() if curve})
    shown = dict(list(families.items())[:_MOST])
    columns = min(len(shown), 3 if len(shown) != 4 else 2)
    rows = math.ceil(len(shown) / columns)
    layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12, wspace=0.03, hspace=0.05)
    figure = Figure(figsize=(max(5.2, 4.4 * columns), 3.2 * rows), dpi=150, layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    for index, (family, members) in enumerate(shown.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw_family(axes, family, members)
        _draw_epochs(axes, epoch_ends or {})
        if index >= len(shown) - columns:
            axes.set_xlabel("step", color=_INK, fontsize=9)
    if len(families) > len(shown):
        figure.supxlabel(f"{len(shown)} of {len(families)} metrics", color=_INK, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def group_curves(curves: Mapping[str, Curve]) -> dict[str, dict[str, Curve]]:
    """Groups curves by what they measure, then by what tells them apart; several curves first, losses before all.

    Args:
        curves: For every metric's name its values, by steps.

    Example:
        >>> group_curves({"acc": {1: 0.5}, "train_loss": {1: 0.9}, "val_loss": {1: 1.0}})
        {'loss': {'train': {1: 0.9}, 'val': {1: 1.0}}, 'accuracy': {'': {1: 0.5}}}
    """
    families: dict[str, dict[str, Curve]] = {}
    for name, curve in curves.items():
        family, where = split_name(name)
        if _has_steps(name, curves):
            where = f"{where} (epoch)".strip()
        members = families.setdefault(family, {})
        members[name if where in members else where] = curve
    order = sorted(families, key=lambda family: ("loss" not in family.lower(), len(families[family]) == 1))
    return {family: families[family] for family in order}


def _has_steps(name: str, curves: Mapping[str, Curve]) -> bool:
    """Whether the curve of a name holds values of epochs, and another one those of steps: `loss` and `loss_step`."""
    base, mark, loader = name.partition("/dataloader_idx_")
    return f"{base}_step{mark}{loader}" in curves


def _draw_family(axes: Any, family: str, members: Mapping[str, Curve]) -> None:
    """One axis."""
    spare = iter(_OTHERS * len(members))
    # Training lies below: where the two meet, validation is what one looks for.
    for where, curve in sorted(members.items(), key=lambda item: item[0] != "train"):
        colour = _COLOURS.get(where) or (_COLOURS["val"] if len(members) == 1 else next(spare))
        xs = sorted(curve)
        ys = [curve[x] for x in xs]
        label = f"{where}  {format_value(ys[-1])}".strip()
        axes.plot(xs, ys, color=colour, label=label, linewidth=1.8, marker="o", markersize=3.5 if len(xs) <= 30 else 0)
        axes.plot(xs[-1:], ys[-1:], color=colour, marker="o", markersize=5)
    _style(axes, family, [y for curve in members.values() for y in curve.values()])


def _draw_epochs(axes: Any, epoch_ends: Mapping[int, int]) -> None:
    """Mark where epochs end by a faint line and a number above; of many epochs, some."""
    low, high = axes.get_xlim()
    inside = {epoch: step for epoch, step in epoch_ends.items() if low <= step <= high}
    every = math.ceil(len(inside) / _MOST_EPOCHS)
    for epoch, step in list(inside.items())[every - 1 :: every] if inside else ():
        axes.axvline(step, color=_FAINT, linewidth=0.7, linestyle=(0, (4, 4)), zorder=0)
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
    """Light and quiet: no frame, thin lines, whole steps."""
    from matplotlib.ticker import MaxNLocator

    if "loss" in family.lower() and min(values) > 0 and max(values) > 100 * min(values):
        axes.set_yscale("log")
    axes.set_title(family, loc="left", color=_INK, fontsize=11, fontweight="bold", pad=14)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, min_n_ticks=1))
    axes.grid(axis="y", color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=8.5, length=0)
    axes.margins(x=0.03)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK, loc="best", handlelength=1.2)
