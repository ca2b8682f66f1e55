"""The decision page and its picture speak of every strategy."""

import re
from pathlib import Path
from xml.etree import ElementTree

from equipoise import Strategy
from equipoise.names.public import public_classes

DOCS = Path(__file__).parents[2] / "docs"
NAMES = {strategy.name for strategy in public_classes("equipoise.strategies", Strategy)}


def test_the_page_names_every_strategy() -> None:
    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    assert {name for name in NAMES if f"`{name}`" not in page} == set()


def test_the_picture_names_strategies_that_exist() -> None:
    picture = ElementTree.parse(DOCS / "images" / "choosing.svg")
    words = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}tspan")]
    shown = {word for word in words if re.fullmatch(r"[a-z_]+", word)}
    # On CPUs alone, which the picture leaves out.
    assert shown == NAMES - {"hogwild"}
