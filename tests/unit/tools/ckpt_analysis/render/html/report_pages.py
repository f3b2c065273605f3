"""What the tests of the HTML report share: pages of known runs, and a page taken apart."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from tools.ckpt_analysis.compare.comparison import compare_variants
from tools.ckpt_analysis.compare.variants import Variant
from tools.ckpt_analysis.ingest.load import load_trace
from tools.ckpt_analysis.render.html.page import comparison_page, run_page
from tools.ckpt_analysis.report import Analysis, Report, analyse


def analysis_of(directory: Path) -> Analysis:
    return analyse(load_trace(directory))


def page_of(directory: Path) -> str:
    return run_page(analysis_of(directory))


def page_comparing(**named: list[Report]) -> str:
    """The page that compares runs, repeats under one name."""
    variants = [Variant(name, reports) for name, reports in named.items()]
    return comparison_page(compare_variants(variants), variants)


@dataclass
class Element:
    """A start tag with its attributes and the text directly inside it."""

    tag: str
    attributes: dict[str, str]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """All elements of a page, in order."""

    source: str = field(repr=False)
    elements: list[Element] = field(default_factory=list, repr=False)
    _open: list[Element] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in ("meta", "link", "br", "wbr"):
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop().tag != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1].text += data

    def all(self, tag: str, **attributes: str) -> list[Element]:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [e for e in self.elements if e.tag == tag and all(e.attributes.get(k) == v for k, v in wanted.items())]

    def plots(self) -> dict[str, list[dict[str, Any]]]:
        (script,) = self.all("script", id="plots")
        return json.loads(script.text)
