"""Areas in proportion, no two cells over one another, nothing lost where cells are merged."""

import math
import random

from equipoise.extensions.report.page.treemap import Box, fold, squarify, tree_map
from equipoise.memory.records import CATEGORIES, TensorRecord
from tests.extensions.common.page.parsing import Element, parse
from tests.extensions.report.page.records import composition, holder


def draw_tree(holders: list[TensorRecord]) -> Element:
    return parse(tree_map(composition(*holders))).one("svg", "treemap")


def box_of(element: Element) -> Box:
    """In pixels of a picture as wide as it was laid out for."""
    x, y, width, height = (element.attributes[name] for name in ("x", "y", "width", "height"))
    return Box(10.8 * float(x[:-1]), float(y), 10.8 * float(width[:-1]), float(height))


def common(a: Box, b: Box) -> tuple[float, float]:
    """Return width and height of what two boxes have in common; one of them is negative where they lie apart."""
    width = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
    height = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
    return width, height


def random_holders(draw: random.Random, count: int) -> list[TensorRecord]:
    def module() -> str:
        return ".".join(f"m{draw.randrange(4)}" for _ in range(draw.randrange(5)))

    return [
        holder(module(), int(10 ** draw.uniform(0, 9)), category=draw.choice(CATEGORIES), name=f"t{index}")
        for index in range(count)
    ]


class TestSquarify:
    def test_the_example_of_the_paper(self):
        """Bruls, Huizing and van Wijk, figure 4: areas 6, 6, 4, 3, 2, 2, 1 in a box of 6 by 4."""
        cells = squarify([6, 6, 4, 3, 2, 2, 1], Box(0, 0, 6, 4))
        assert [(round(cell.width, 2), round(cell.height, 2)) for cell in cells] == [
            (3, 2),
            (3, 2),
            (1.71, 2.33),
            (1.29, 2.33),
            (1.2, 1.67),
            (1.2, 1.67),
            (0.6, 1.67),
        ]

    def test_no_sizes_have_no_cells_and_no_room_empty_ones(self):
        assert squarify([], Box(0, 0, 1, 1)) == []
        assert all(cell.width * cell.height == 0 for cell in squarify([3, 2, 1], Box(0, 0, 0, 5)))


class TestFold:
    def test_few_stay_as_they_are(self):
        holders = [holder("a", 1), holder("b", 3), holder("c", 0), holder("d", 2)]
        assert [each.module for each in fold(holders)] == ["b", "d", "a"]

    def test_no_byte_is_lost_and_the_largest_stand_alone(self):
        seed = random.randrange(2**32)
        print("seed", seed)
        holders = random_holders(random.Random(seed), 3000)
        folded = fold(holders)
        assert len(folded) <= 200
        largest = sorted(holders, key=lambda each: -each.nbytes)[:100]
        assert set(largest) <= set(folded)
        for category in CATEGORIES:
            before, after = (sum(h.nbytes for h in some if h.category == category) for some in (holders, folded))
            assert before == after

    def test_equal_ones_are_merged_or_kept_together(self):
        holders = [holder(f"layers.{n // 4}.part{n % 4}", 100) for n in range(400)] + [holder("head", 10**6)]
        folded = fold(holders)
        assert [(each.module, each.name, each.nbytes) for each in folded[:1]] == [("head", "linear", 10**6)]
        assert {(each.name, each.nbytes) for each in folded[1:]} == {("400 others", 40_000)}

    def test_modules_are_told_apart_as_deep_as_there_is_room(self):
        holders = [holder(f"layers.{n // 40}.part{n % 40}", 100) for n in range(400)]
        assert {(each.module, each.name) for each in fold(holders)} == {(f"layers.{n}", "40 others") for n in range(10)}


class TestPicture:
    def test_cells_lie_within_their_modules_and_beside_one_another(self):
        seed = random.randrange(2**32)
        print("seed", seed)
        picture = draw_tree(random_holders(random.Random(seed), 150))
        cells = [box_of(cell) for cell in picture.all("svg", "cell")]
        assert len(cells) == 150
        for index, cell in enumerate(cells):
            assert min(cell) >= 0
            assert cell.x + cell.width <= 1080.03
            assert cell.y + cell.height <= 520.03
            for other in cells[:index]:
                assert min(common(cell, other)) <= 0.03  # places are rounded

    def test_areas_are_in_proportion_within_a_module(self):
        sizes = [2**20 * size for size in (8, 4, 2, 1, 1)]
        cells = draw_tree([holder("net.layer", size, name=str(size)) for size in sizes]).all("svg", "cell")
        areas = [box.width * box.height for box in map(box_of, cells)]
        for size, area in zip(sizes, areas, strict=True):
            assert math.isclose(area / sum(areas), size / sum(sizes), rel_tol=1e-3)

    def test_a_cell_tells_what_it_is(self):
        holders = [holder("net.0", 3 * 2**20, name="weight", category="parameter"), holder("net.1", 2**20)]
        first, second = draw_tree(holders).all("svg", "cell")
        assert first.one("title").text == "net.0 · weight\nparameter float32 [2, 3]\n3.0 MiB, 75%"
        assert "k-parameter" in first.attributes["class"]
        assert [text.text for text in second.all("text")] == ["linear", "1 MiB"]

    def test_groups_are_named(self):
        holders = [holder(f"net.body.{index}.{part}", 100) for index in range(2) for part in "ab"]
        groups = draw_tree([*holders, holder("net.head", 100)]).all("svg", "group")
        levels = {group.one("title").text.split("\n")[0]: group.attributes["class"].split()[-1] for group in groups}
        assert levels.items() >= {"net.body": "d1", "net.head": "d1", "net.body.0": "d2"}.items()
