"""Tests of benchmark reports: verdicts, medians, and the three files."""

import json
import sys

import pytest

from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target

RECORDS = [{"kind": "a", "seconds": value, "nbytes": 2} for value in (5, 1, 3)] + [
    {"kind": "a", "error": "x"},
    {"kind": "b"},
]


@pytest.mark.parametrize(
    ("value", "at_least", "verdict"),
    [
        (1.0, False, "met"),
        (1.01, False, "not met"),
        (1.0, True, "met"),
        (0.99, True, "not met"),
        (None, True, "not measured"),
    ],
)
def test_verdicts(value, at_least, verdict):
    target = Target("a ratio", value, 1, at_least)
    assert target.verdict == verdict
    assert f": {verdict})" in str(target)


def test_a_report_is_written_in_three_ways(tmp_path, monkeypatch):
    chart = Chart("a chart", ("one", "two"), {"first": [1.0, None], "second": [2.0, 0.5]})
    report = Report(
        "A title",
        {"date": "today"},
        [Table("A table", "A note.", ("a", "b"), [("1", "2")])],
        [Target("x", 2, 1)],
        RECORDS,
        chart,
    )
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report.write(tmp_path / "out", "name")
    page = (tmp_path / "out" / "name.md").read_text()
    assert "| x | 2.000 | <= 1 | not met |" in page
    assert "| a | b |\n| --- | --- |\n| 1 | 2 |" in page
    assert (
        page == report.to_markdown() + "\nNo plot: matplotlib is not installed (`pip install hfq[plots]`).\n"
    )
    document = json.loads((tmp_path / "out" / "name.json").read_text())
    assert document["records"] == RECORDS
    assert document["targets"][0]["verdict"] == "not met"
    assert not (tmp_path / "out" / "name.png").exists()


def test_a_plot_is_drawn_where_matplotlib_is(tmp_path):
    pytest.importorskip("matplotlib")
    report = Report(
        "t", {}, [], [], [], Chart("a chart", ("one", "two"), {"first": [1.0, None], "second": [2.0, 0.5]})
    )
    report.write(tmp_path, "name")
    assert (tmp_path / "name.png").stat().st_size > 1000
    assert "![a chart](name.png)" in (tmp_path / "name.md").read_text()
