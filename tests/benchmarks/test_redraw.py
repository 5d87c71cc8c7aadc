"""Tests of charts that are drawn again from recorded results."""

import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.redraw import redraw
from hfq.errors import SetupError

RECORDS = sorted((Path(__file__).parents[2] / "docs" / "benchmarks").glob("*.json"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_every_record_has_a_chart_that_can_be_drawn(record, tmp_path):
    pytest.importorskip("matplotlib")
    picture = redraw(Path(shutil.copy(record, tmp_path)))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_chart_without_matplotlib_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SetupError, match=r"pip install hfq\[plots\]"):
        redraw(Path(shutil.copy(RECORDS[0], tmp_path)))
