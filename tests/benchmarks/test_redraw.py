"""Tests of charts that are drawn again from recorded results."""

import shutil
from pathlib import Path

import pytest

from benchmarks.redraw import redraw

RECORDS = sorted((Path(__file__).parents[2] / "docs" / "benchmarks").glob("*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_every_record_has_a_chart_that_can_be_drawn(record, tmp_path):
    pytest.importorskip("matplotlib")
    picture = redraw(Path(shutil.copy(record, tmp_path)))
    assert picture.read_bytes().startswith(b"\x89PNG")
