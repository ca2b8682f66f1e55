"""A page taken apart again, strictly: what is opened is closed, and what is text is not markup."""

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

__all__ = ["Element", "check_closed", "parse", "sections"]

_EMPTY = {"meta", "wbr", "link", "img"}


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


def sections(document: Element) -> dict[str, Element]:
    return {section.one("h2").content[0]: section for section in document.all("section")}


def check_closed(page: str, *, may_link: bool = False) -> None:
    """Check that only our own script and style may run in a page, and that it fetches nothing."""
    document = parse(page)
    policies = [meta.attributes.get("content", "") for meta in document.all("meta")]
    (policy,) = [each for each in policies if each.startswith("default-src 'none';")]
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(document.one(name).text.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert set(re.findall(r"\w+://[^\s\"']+", page)) <= {"http://www.w3.org/2000/svg"}
    refused = {"src", "style"} if may_link else {"src", "style", "href"}
    for element in document:
        assert not refused & element.attributes.keys()
        assert not any(name.startswith("on") for name in element.attributes)
