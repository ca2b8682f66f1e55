"""Tree map of a memory peak: modules within modules, areas in proportion to bytes.

Rows of cells are laid out as in Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000).
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from equipoise.memory.devices import format_bytes
from equipoise.memory.records import Category, Composition, TensorRecord
from equipoise.report.page.markup import Markup, tag
from equipoise.report.page.scales import format_value

__all__ = ["Box", "fold", "squarify", "style_of", "tree_map"]

_WIDTH, _HEIGHT = 1080.0, 520.0  # the width is that of a screen; the picture is stretched to its place
_HEADER = 19.0
_SINGLE, _MERGED = 120, 80  # cells for single tensors, and for what is left


class Box(NamedTuple):
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float


def squarify(sizes: Sequence[float], box: Box) -> list[Box]:
    """Divides a rectangle into cells as square as can be.

    Args:
        sizes: Positive, the largest first.
        box: What is divided.

    Returns:
        For each size a cell whose area is in proportion to it.

    Example:
        >>> for cell in squarify([2, 1, 1], Box(0.0, 0.0, 4.0, 2.0)):
        ...     print(*cell)
        0.0 0.0 2.0 2.0
        2.0 0.0 2.0 1.0
        2.0 1.0 2.0 1.0
    """
    cells: list[Box] = []
    left, start = box, 0
    total = float(sum(sizes))
    while start < len(sizes):
        side = min(left.width, left.height)
        density = left.width * left.height / total if total > 0 else 0.0
        end = start + 1
        while end < len(sizes) and _worst(sizes[start : end + 1], side, density) <= _worst(
            sizes[start:end], side, density
        ):
            end += 1
        row = sizes[start:end]
        share = sum(row) / total if end < len(sizes) else 1.0
        placed, left = _lay_row(row, left, share)
        cells += placed
        total -= sum(row)
        start = end
    return cells


def _worst(row: Sequence[float], side: float, density: float) -> float:
    """The largest ratio of the sides of a row's cells."""
    area = sum(row) * density
    if area <= 0 or side <= 0:
        return float("inf")
    return max(side * side * row[0] * density / area**2, area**2 / (side * side * row[-1] * density))


def _lay_row(row: Sequence[float], left: Box, share: float) -> tuple[list[Box], Box]:
    """Puts a row along the shorter side; returns its cells and what remains."""
    cells, whole, done = [], float(sum(row)), 0.0
    if left.width >= left.height:
        width = left.width * share
        for size in row:
            cells.append(Box(left.x, left.y + left.height * done, width, left.height * size / whole))
            done += size / whole
        return cells, Box(left.x + width, left.y, left.width - width, left.height)
    height = left.height * share
    for size in row:
        cells.append(Box(left.x + left.width * done, left.y, left.width * size / whole, height))
        done += size / whole
    return cells, Box(left.x, left.y + height, left.width, left.height - height)


def fold(holders: Sequence[TensorRecord], single: int = _SINGLE, merged: int = _MERGED) -> list[TensorRecord]:
    """Keeps the largest holders and merges the others by module and category, so that a picture can show them.

    Args:
        holders: What was alive.
        single: How many stay as they are at most. Default: 120.
        merged: How many merged ones there may be, as long as a module's outermost name tells them apart. Default: 80.

    Returns:
        Holders whose bytes have the same sum.
    """
    ordered = sorted((holder for holder in holders if holder.nbytes > 0), key=lambda holder: -holder.nbytes)
    if len(ordered) <= single + merged:
        return ordered
    kept = [holder for holder in ordered[:single] if holder.nbytes > ordered[single].nbytes]  # equals stay together
    rest = ordered[len(kept) :]
    deepest = max(holder.module.count(".") + 1 for holder in rest)
    for depth in range(deepest, -1, -1):
        groups: dict[tuple[str, Category], list[int]] = defaultdict(list)
        for holder in rest:
            groups[".".join(holder.module.split(".")[:depth]), holder.category].append(holder.nbytes)
        if len(groups) <= merged:
            break
    for (module, category), sizes in groups.items():
        name = f"{len(sizes):,} others" if len(sizes) > 1 else "1 other"
        kept.append(TensorRecord(module=module, category=category, name=name, shape=(), dtype="", nbytes=sum(sizes)))
    return sorted(kept, key=lambda holder: -holder.nbytes)


@dataclass
class _Node:
    """A module: what it holds itself, and the modules in it."""

    name: str
    path: str
    own: list[TensorRecord] = field(default_factory=list)
    inner: dict[str, "_Node"] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(holder.nbytes for holder in self.own) + sum(node.nbytes for node in self.inner.values())


def _tree(holders: Sequence[TensorRecord]) -> _Node:
    root = _Node("", "")
    for holder in holders:
        node = root
        for name in filter(None, holder.module.split(".")):
            path = f"{node.path}.{name}" if node.path else name
            node = node.inner.setdefault(name, _Node(name, path))
        node.own.append(holder)
    return root


def _collapsed(node: _Node) -> _Node:
    """Where a module holds nothing but one other, both are one."""
    while len(node.inner) == 1 and not node.own:
        (only,) = node.inner.values()
        node = replace(only, name=f"{node.name}.{only.name}" if node.name else only.name)
    return node


def tree_map(composition: Composition, detail: float = 1.0) -> Markup:
    """Draws a composition; a cell is a tensor or several, its colour their category.

    Args:
        composition: What was alive; holders of no bytes are left out.
        detail: What part of the usual number of cells it may have. Default: 1.
    """
    holders = fold(composition.holders, round(detail * _SINGLE), round(detail * _MERGED))
    total = sum(holder.nbytes for holder in holders)
    pieces: list[Markup] = []
    _lay(_collapsed(_tree(holders)), Box(0, 0, _WIDTH, _HEIGHT), 0, max(total, 1), pieces)
    largest = Counter[str]()
    for holder in holders:
        largest[holder.category] += holder.nbytes
    parts = ", ".join(f"{category} {format_bytes(nbytes)}" for category, nbytes in largest.most_common())
    title = tag("title", f"Memory on {composition.device} by module: {parts}")
    return tag("svg", title, *pieces, class_="treemap", role="img", height=round(_HEIGHT))


def _lay(node: _Node, box: Box, depth: int, total: int, pieces: list[Markup]) -> None:
    """Draws a module and what is in it; where there is room its name stands above."""
    named = not depth
    if depth:
        tip = tag("title", f"{node.path}\n{_amount(node.nbytes, total)}")
        named = box.width > 60 and box.height > 5 * _HEADER  # elsewhere it would take the place of what it names
        label = tag("text", node.name, x=5, y=14) if named else None
        style = f"group d{min(depth, 3)}"
        pieces.append(_placed(box, tip, tag("rect", width="100%", height="100%"), label, class_=style))
        edge = min(2.0, box.width / 4, box.height / 4)
        top = _HEADER if named else edge
        box = Box(box.x + edge, box.y + top, box.width - 2 * edge, box.height - top - edge)
    parts: list[_Node | TensorRecord] = [*node.own, *map(_collapsed, node.inner.values())]
    parts.sort(key=lambda part: -part.nbytes)
    for part, cell in zip(parts, squarify([part.nbytes for part in parts], box), strict=True):
        if isinstance(part, _Node):
            _lay(part, cell, depth + 1, total, pieces)
        else:
            pieces.append(_cell(part, cell, total, "" if named else node.name))


def _cell(holder: TensorRecord, box: Box, total: int, owner: str) -> Markup:
    """Draws a holder; `owner` is its module, where that has no name above."""
    shape = f"{holder.dtype} [{', '.join(map(str, holder.shape))}]" if holder.dtype else ""
    where = f"{holder.module} · {holder.name}" if holder.module else holder.name
    tip = "\n".join(filter(None, (where, f"{holder.category} {shape}".strip(), _amount(holder.nbytes, total))))
    texts = []
    if box.width > 36 and box.height > 17:
        texts.append(tag("text", f"{owner} · {holder.name}" if owner else holder.name, x=5, y=14))
    if box.width > 48 and box.height > 34:
        texts.append(tag("text", format_value(holder.nbytes, "bytes"), x=5, y=29, class_="small"))
    content = (tag("title", tip), tag("rect", width="100%", height="100%"), *texts)
    return _placed(box, *content, class_=f"cell {style_of(holder.category)}")


def style_of(category: str) -> str:
    """The class that says a category's colour."""
    return "k-" + category.replace(" ", "-")


def _amount(nbytes: int, total: int) -> str:
    return f"{format_bytes(nbytes)}, {100 * nbytes / total:.3g}%"


def _placed(box: Box, *content: Markup | None, class_: str) -> Markup:
    """An inner picture at a box, which cuts off what goes beyond it."""
    return tag(
        "svg",
        *content,
        class_=class_,
        x=f"{100 * box.x / _WIDTH:.3f}%",
        y=f"{box.y:.2f}",
        width=f"{100 * max(box.width, 0) / _WIDTH:.3f}%",
        height=f"{max(box.height, 0):.2f}",
    )
