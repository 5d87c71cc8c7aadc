"""Tests of drawings: PNG files, and SVG for a page with others."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from hfq.plots.documents import read_section, write_report
from hfq.plots.drawing import INK, draw_svg

pytestmark = pytest.mark.slow
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

KINDS = ("run", "plan", "bench", "eval", "zero3", "catalog", "ladder")


@pytest.fixture
def sections(write, result):
    return {kind: read_section(write(kind, result(kind))) for kind in KINDS}


def test_every_picture_is_an_svg_of_its_own(sections):
    known: set[str] = set()
    for kind, section in sections.items():
        for picture in section.pictures:
            svg = draw_svg(picture, f"{kind}-{picture.name}")
            ElementTree.fromstring(svg)
            ids = set(re.findall(r'\bid="([^"]*)"', svg))
            assert not ids & known
            known |= ids
            assert set(re.findall(r'(?:xlink:href="#|url\(#)([^")]*)', svg)) <= ids
            assert "currentColor" in svg
            assert INK not in svg
            assert "<metadata" not in svg
            assert "<text" in svg  # text stays text


def test_names_are_never_formulas(sections):
    svg = draw_svg(sections["eval"].pictures[0], "x")
    assert "$a_b$" in svg


def test_the_same_numbers_make_the_same_picture(sections):
    picture = sections["plan"].pictures[0]
    assert draw_svg(picture, "x") == draw_svg(picture, "x")


def test_files_are_named_after_what_they_show(write, result, tmp_path):
    (tmp_path / "more").mkdir()
    other = tmp_path / "more" / "run.json"
    other.write_text(write("run", result("run")).read_text())
    found = write_report([tmp_path / "run.json", other], tmp_path / "out", as_page=True)
    assert [file.name for file in found] == [
        "run-placement.png",
        "run-timeline.png",
        "run.trace.json",
        "run-2-placement.png",
        "run-2-timeline.png",
        "run-2.trace.json",
        "report.html",
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in found if file.suffix == ".png")
    assert found[-1].read_text(encoding="utf-8").count("<svg") == 4
