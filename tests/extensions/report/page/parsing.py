"""A page taken apart again, strictly: what is opened is closed, and what is text is not markup."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

__all__ = ["Element", "parse"]

_EMPTY = {"meta", "br", "link", "img"}


@dataclass
class Element:
    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    content: list["Element | str"] = field(default_factory=list)

    def __iter__(self) -> Iterator["Element"]:
        """This element and all in it."""
        yield self
        for piece in self.content:
            if isinstance(piece, Element):
                yield from piece

    @property
    def text(self) -> str:
        return "".join(piece if isinstance(piece, str) else piece.text for piece in self.content)

    def all(self, name: str, class_: str | None = None) -> list["Element"]:
        found = (each for each in self if each.name == name)
        return [each for each in found if class_ is None or class_ in each.attributes.get("class", "").split()]

    def one(self, name: str, class_: str | None = None) -> "Element":
        (found,) = self.all(name, class_)
        return found


class _Parser(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("document")]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs), f"{tag} has an attribute twice: {attrs}"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].content.append(element)
        if tag not in _EMPTY:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> closes <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].content.append(data)


def parse(page: str) -> Element:
    parser = _Parser()
    parser.feed(page)
    parser.close()
    (document,) = parser.open
    return document
