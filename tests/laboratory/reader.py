"""Reads a page as a strict browser would."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "link", "img"}
OUTSIDE = ("src", "href", "xlink:href", "data", "action", "poster", "srcset")


class Reader(HTMLParser):
    """Checks that tags close in order; collects tags, identifiers, references and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.handlers: list[str] = []
        self.labels: list[str] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = {name: value or "" for name, value in attrs}
        self.ids += [found["id"]] if "id" in found else []
        self.references += [found[name] for name in OUTSIDE if name in found]
        self.handlers += [name for name in found if name.startswith("on")]
        if tag == "svg":
            self.labels.append(found.get("aria-label", ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def check_alone_and_whole(page: str) -> Reader:
    """Well formed, without anything from outside, without anything that runs; every label once."""
    reader = Reader(page)
    assert reader.open == []
    assert len(reader.ids) == len(set(reader.ids))
    inside = {r.removeprefix("#") for r in reader.references if r.startswith("#")}
    inside |= set(re.findall(r"url\(#([^)]+)\)", page))
    assert inside <= set(reader.ids)
    for reference in reader.references:
        assert reference.startswith(("#", "data:")), reference
    assert not re.search(r"@import|url\((?!#)", page)
    assert not {"script", "iframe", "object", "embed", "form"} & set(reader.tags)
    assert not reader.handlers
    assert all(reader.labels)
    assert len(set(reader.labels)) == len(reader.labels)
    assert reader.tags.count("svg") == reader.tags.count("figure")
    return reader
