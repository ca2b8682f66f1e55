"""Tree map of a memory peak: modules within modules, areas in proportion to bytes.

Rows of cells are laid out as in Bruls, Huizing and van Wijk, "Squarified Treemaps" (2000).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from equipoise.extensions.common.page.markup import Markup, picture, tag
from equipoise.formats import format_bytes, format_quantity
from equipoise.memory.records import Category, Composition, TensorRecord

__all__ = ["Box", "fold", "squarify", "style_of", "tree_map"]

# The picture in pixels. The width is that of a screen; the page stretches it.
_WIDTH = 1080.0
_HEIGHT = 520.0
_HEADER = 19.0
_EDGE = 2.0
# Cells for single tensors, and for merged ones.
_SINGLE = 120
_MERGED = 80


class Box(NamedTuple):
    """Rectangle of a picture, in pixels."""

    x: float
    y: float
    width: float
    height: float

    def transposed(self) -> "Box":
        """Return the rectangle with its axes exchanged."""
        return Box(self.y, self.x, self.height, self.width)


def squarify(sizes: Sequence[float], box: Box) -> list[Box]:
    """Divide a rectangle into cells that are as square as possible.

    Args:
        sizes: Positive sizes, the largest first.
        box: The rectangle.

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
    free = box
    begin = 0
    total = float(sum(sizes))
    while begin < len(sizes):
        # 1. Extend the row while its worst cell does not become longer.
        end = _end_of_row(sizes, begin, free, total)
        row = sizes[begin:end]
        # 2. The last row fills the rectangle, whatever rounding has left.
        share = 1.0
        if end < len(sizes):
            share = sum(row) / total
        # 3. Lay it out, and continue in the rest.
        row_cells, free = _lay_row(row, free, share)
        cells += row_cells
        total -= sum(row)
        begin = end
    return cells


def _end_of_row(sizes: Sequence[float], begin: int, free: Box, total: float) -> int:
    """Return the index after the last size of the row that begins at `begin`."""
    # Rows lie along the shorter side, so that cells become less long.
    side = min(free.width, free.height)
    density = 0.0
    if total > 0:
        density = free.width * free.height / total
    end = begin + 1
    ratio = _worst_ratio(sizes[begin:end], side, density)
    while end < len(sizes):
        longer_ratio = _worst_ratio(sizes[begin : end + 1], side, density)
        if longer_ratio > ratio:
            break
        ratio = longer_ratio
        end += 1
    return end


def _worst_ratio(row: Sequence[float], side: float, density: float) -> float:
    """Return the largest ratio of the sides of a row's cells.

    Args:
        row: Sizes of the row, the largest first.
        side: Length of the row in pixels.
        density: Area of a size of 1.
    """
    # The row is `area / side` thick. The cell with the worst ratio is that of the largest or of the smallest size.
    area = sum(row) * density
    if area <= 0 or side <= 0:
        return float("inf")
    ratio_of_largest = side * side * row[0] * density / area**2
    ratio_of_smallest = area**2 / (side * side * row[-1] * density)
    return max(ratio_of_largest, ratio_of_smallest)


def _lay_row(row: Sequence[float], free: Box, share: float) -> tuple[list[Box], Box]:
    """Put a row along the shorter side; return its cells and the rest of the rectangle."""
    if free.width < free.height:
        cells, rest = _lay_row(row, free.transposed(), share)
        return [cell.transposed() for cell in cells], rest.transposed()
    cells = []
    total = float(sum(row))
    width = free.width * share
    # Position of the next cell, as a share of the row's length.
    position = 0.0
    for size in row:
        y = free.y + free.height * position
        height = free.height * size / total
        cells.append(Box(free.x, y, width, height))
        position += size / total
    rest = Box(
        free.x + width,
        free.y,
        free.width - width,
        free.height,
    )
    return cells, rest


def fold(records: Sequence[TensorRecord], single: int = _SINGLE, merged: int = _MERGED) -> list[TensorRecord]:
    """Merge small tensors by module and category, so that a picture can show them.

    Args:
        records: The live tensors.
        single: Maximum number of tensors that stay as they are. Default: 120.
        merged: Maximum number of merged records, unless the outermost modules alone are more. Default: 80.

    Returns:
        Records with the same sum of bytes, the largest first.
    """
    ordered = _by_size(record for record in records if record.nbytes > 0)
    if len(ordered) <= single + merged:
        return ordered
    # Tensors of equal size are merged together or not at all.
    limit = ordered[single].nbytes
    folded = [record for record in ordered[:single] if record.nbytes > limit]
    small = ordered[len(folded) :]
    for (module, category), sizes in _groups(small, merged).items():
        name = "1 other"
        if len(sizes) > 1:
            name = f"{len(sizes):,} others"
        folded.append(
            TensorRecord(
                module=module,
                category=category,
                name=name,
                shape=(),
                dtype="",
                nbytes=sum(sizes),
            )
        )
    return _by_size(folded)


def _by_size(records: Iterable[TensorRecord]) -> list[TensorRecord]:
    return sorted(records, key=lambda record: -record.nbytes)


# Sizes of tensors by module and category.
_Groups = dict[tuple[str, Category], list[int]]


def _groups(records: Sequence[TensorRecord], most: int) -> _Groups:
    """Group sizes by category and module, at the deepest level of modules with at most `most` groups."""
    deepest = max(record.module.count(".") + 1 for record in records)
    # At depth 0 all modules are one, so there is a group for each category.
    for depth in range(deepest, -1, -1):
        groups: _Groups = defaultdict(list)
        for record in records:
            module = ".".join(record.module.split(".")[:depth])
            groups[module, record.category].append(record.nbytes)
        if len(groups) <= most:
            break
    return groups


@dataclass
class _Node:
    """A module with its tensors and its submodules."""

    name: str
    path: str
    tensors: list[TensorRecord] = field(default_factory=list)
    children: dict[str, "_Node"] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        tensors = sum(record.nbytes for record in self.tensors)
        return tensors + sum(child.nbytes for child in self.children.values())

    def child(self, name: str) -> "_Node":
        """Return the submodule of a name; add it if it is new."""
        if name not in self.children:
            path = name
            if self.path:
                path = f"{self.path}.{name}"
            self.children[name] = _Node(name, path)
        return self.children[name]


def _tree(records: Sequence[TensorRecord]) -> _Node:
    root = _Node("", "")
    for record in records:
        node = root
        # The root's path is empty, and so is its name.
        for name in filter(None, record.module.split(".")):
            node = node.child(name)
        node.tensors.append(record)
    return root


def _collapsed(node: _Node) -> _Node:
    """Join a module that has a single submodule and no tensors with that submodule."""
    while len(node.children) == 1 and not node.tensors:
        (child,) = node.children.values()
        name = child.name
        if node.name:
            name = f"{node.name}.{name}"
        node = replace(child, name=name)
    return node


def tree_map(composition: Composition, detail: float = 1.0) -> Markup:
    """Draw a composition; a cell is one tensor or several, its colour their category.

    Args:
        composition: The live tensors; those of no bytes are left out.
        detail: Share of the usual number of cells. Default: 1.
    """
    records = fold(composition.holders, round(detail * _SINGLE), round(detail * _MERGED))
    drawing = _Drawing(max(sum(record.nbytes for record in records), 1))
    drawing.add_node(_collapsed(_tree(records)), Box(0, 0, _WIDTH, _HEIGHT), depth=0)
    totals = Counter[str]()
    for record in records:
        totals[record.category] += record.nbytes
    listed = ", ".join(f"{category} {format_bytes(nbytes)}" for category, nbytes in totals.most_common())
    title = f"Memory on {composition.device} by module: {listed}"
    return picture(title, *drawing.elements, class_="treemap", height=round(_HEIGHT))


class _Drawing:
    """Elements of a tree map."""

    def __init__(self, total: int) -> None:
        self.elements: list[Markup] = []
        self._total = total

    def add_node(self, node: _Node, box: Box, depth: int) -> None:
        """Draw a module, its tensors and its submodules."""
        # The root needs no name. Elsewhere a name without room would hide the module that it names.
        has_room = box.width > 60 and box.height > 5 * _HEADER
        is_named = depth == 0 or has_room
        if depth:
            self._add_frame(node, box, depth, is_named=is_named)
            box = _inside(box, is_named=is_named)
        # Cells of tensors and of submodules are drawn in the order of their size.
        entries: list[_Node | TensorRecord] = [*node.tensors]
        entries += [_collapsed(child) for child in node.children.values()]
        entries.sort(key=lambda entry: -entry.nbytes)
        cells = squarify([entry.nbytes for entry in entries], box)
        # Cells below a name do not repeat it.
        owner = "" if is_named else node.name
        for entry, cell in zip(entries, cells, strict=True):
            if isinstance(entry, _Node):
                self.add_node(entry, cell, depth + 1)
            else:
                self._add_cell(entry, cell, owner)

    def _add_frame(self, node: _Node, box: Box, depth: int, *, is_named: bool) -> None:
        label = None
        if is_named:
            label = tag("text", node.name, x=5, y=14)
        tip = tag("title", f"{node.path}\n{self._amount(node.nbytes)}")
        # The style sheet has colours for three levels.
        self.elements.append(_placed(box, tip, _background(), label, class_=f"group d{min(depth, 3)}"))

    def _add_cell(self, record: TensorRecord, box: Box, owner: str) -> None:
        """Draw a tensor; `owner` is its module, if no name stands above."""
        # A name may be cut off at its end, a number may not.
        texts = []
        if box.width > 36 and box.height > 17:
            label = record.name
            if owner:
                label = f"{owner} · {record.name}"
            texts.append(tag("text", label, x=5, y=14))
        if box.width > 48 and box.height > 34:
            texts.append(tag("text", format_quantity(record.nbytes, "bytes"), x=5, y=29, class_="small"))
        tip = tag("title", self._tip(record))
        style = f"cell {style_of(record.category)}"
        self.elements.append(_placed(box, tip, _background(), *texts, class_=style))

    def _tip(self, record: TensorRecord) -> str:
        """Return the text that appears under the pointer."""
        path = record.name
        if record.module:
            path = f"{record.module} · {record.name}"
        shape = ""
        if record.dtype:
            sizes = ", ".join(map(str, record.shape))
            shape = f"{record.dtype} [{sizes}]"
        lines = (path, f"{record.category} {shape}".strip(), self._amount(record.nbytes))
        return "\n".join(filter(None, lines))

    def _amount(self, nbytes: int) -> str:
        percent = 100 * nbytes / self._total
        return f"{format_bytes(nbytes)}, {percent:.3g}%"


def _inside(box: Box, *, is_named: bool) -> Box:
    """Return the part of a module's box that its contents fill."""
    edge = min(_EDGE, box.width / 4, box.height / 4)
    top = edge
    if is_named:
        top = _HEADER
    return Box(
        box.x + edge,
        box.y + top,
        box.width - 2 * edge,
        box.height - top - edge,
    )


def style_of(category: str) -> str:
    """Return the CSS class of a category's colour."""
    return "k-" + category.replace(" ", "-")


def _background() -> Markup:
    return tag("rect", width="100%", height="100%")


def _placed(box: Box, *content: Markup | None, class_: str) -> Markup:
    """Return an inner picture at a box, which cuts off anything outside."""
    return tag(
        "svg",
        *content,
        class_=class_,
        x=f"{100 * box.x / _WIDTH:.3f}%",
        y=f"{box.y:.2f}",
        width=f"{100 * max(box.width, 0) / _WIDTH:.3f}%",
        height=f"{max(box.height, 0):.2f}",
    )
