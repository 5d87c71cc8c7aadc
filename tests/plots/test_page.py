"""Tests of the page: self-contained, with texts and tables for all pictures, and any names."""

from html.parser import HTMLParser

import pytest

from hfq.plots.documents import read_section
from hfq.plots.page import make_page

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Parser that records elements with attributes and text, and fails on wrong nesting."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text, self._open = [], [], []
        self.feed(page)
        assert self._open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def page(write, result):
    sections = [read_section(write(kind, result(kind))) for kind in ("run", "plan", "bench", "eval")]
    return make_page(
        sections, draw=lambda picture, prefix: f'<svg id="{prefix}"><title>{len(picture.title)}</title></svg>'
    )


def test_it_holds_every_picture_with_words_and_numbers(page):
    found = Reader(page)
    pictures = found.all("svg")
    assert len(pictures) == len(found.all("figure")) == 6
    assert all(picture["role"] == "img" and len(picture["aria-label"]) > 20 for picture in pictures)
    assert len(found.all("table")) >= 9
    assert len(found.all("section")) == len(found.all("h2")) == 4
    text = " ".join("".join(found.text).split())
    assert "a <b> & c: a loaded model (run.json)" in text  # a folder's own name is text, never markup
    assert "model.layers.1 to model.layers.2 (2)" in text
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {link["href"].removeprefix("#") for link in found.all("a")} <= set(ids)


@pytest.mark.parametrize(
    "hostile",
    ["<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "{{ 7 * 7 }}{% raw %}", "`</code><b>`"],
)
def test_hostile_text_stays_text(hostile, write, result):
    bench = result("bench")
    bench["facts"], bench["title"], bench["chart"]["title"] = {hostile: hostile}, hostile, hostile
    header = [hostile, hostile]
    bench["tables"] = [
        {"title": hostile, "note": f"{hostile}\n- {hostile}", "header": header, "rows": [header]}
    ]
    found = Reader(
        make_page([read_section(write("bench", bench))], draw=lambda picture, prefix: "<svg></svg>")
    )
    assert not {"script", "img", "b"} & {tag for tag, _ in found.elements}
    assert "".join(found.text).count(hostile.replace("`", "")) >= 6


def test_it_asks_for_nothing_and_runs_nothing(page):
    found = Reader(page)
    assert not {"script", "link", "iframe", "img", "object"} & {tag for tag, _ in found.elements}
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]
    assert "http:" not in page
    assert "https:" not in page
    policy = next(
        meta["content"] for meta in found.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")


def test_notes_become_paragraphs_and_lists(page):
    assert "<p>Seconds.</p><ul><li>a: <code>b</code></li><li>c</li></ul>" in page


def test_light_and_dark_have_colours_of_their_own(page):
    assert "prefers-color-scheme: dark" in page
    assert "color-scheme: light dark" in page


def test_a_long_table_can_be_opened(write, result):
    bench = result("bench")
    bench["tables"][0]["rows"] = [[f"row {n}", str(n)] for n in range(40)]
    found = make_page([read_section(write("bench", bench))], draw=lambda picture, prefix: "<svg></svg>")
    assert "<summary>40 rows</summary>" in found
    assert "row 39" in found
