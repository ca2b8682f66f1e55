"""The decision page and its picture speak of every strategy."""

import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NAMES = set(PROJECT["entry-points"]["equipoise.strategies"])


def test_the_page_names_every_strategy() -> None:
    page = (DOCS / "choosing.md").read_text(encoding="utf-8")
    assert {name for name in NAMES if f"`{name}`" not in page} == set()


def test_the_picture_names_strategies_that_exist() -> None:
    picture = ElementTree.parse(DOCS / "images" / "choosing.svg")
    words = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}tspan")]
    shown = {word for word in words if re.fullmatch(r"[a-z_]+", word)}
    # On CPUs alone, and where bits count, which the picture leaves out.
    assert shown == NAMES - {"hogwild", "virtual"}
