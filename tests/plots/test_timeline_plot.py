"""Tests of the timeline: the displayed pass, positions of spans, and times counted once."""

import pytest

from hfq.offload.spans import Span
from hfq.plots.timeline_plot import busy_seconds, last_pass, timeline_picture
from tests.plots.conftest import SPANS

BLOCKS = ["model.layers.1", "model.layers.2"]


def spans():
    return [Span(*span) for span in SPANS]


def test_the_last_pass_is_shown_and_cut():
    shown, seconds = last_pass(spans())
    assert seconds == pytest.approx(0.010)  # a difference of two decimal fractions
    assert (shown[0].start, shown[0].end) == (0.0, 0.001)
    assert shown[-1].end == pytest.approx(0.010)
    earlier = [Span("pass", "", -1.0, -0.5), Span("compute", "old", -0.9, -0.8)]
    assert "old" not in {span.name for span in last_pass(earlier + spans())[0]}


def test_without_a_pass_everything_is_shown():
    shown, seconds = last_pass([span for span in spans() if span.track != "pass"])
    assert len(shown) == len(SPANS) - 1
    assert seconds == pytest.approx(0.013)  # a difference of two decimal fractions


def test_what_overlaps_is_counted_once():
    assert busy_seconds(Span("read", "", *times) for times in [(3, 4), (0, 2), (1, 2), (1, 3), (6, 7)]) == 5
    assert busy_seconds([]) == 0


def test_the_table_sums_up_each_block():
    picture = timeline_picture(spans(), BLOCKS)
    assert picture.table.rows[1] == ("model.layers.2", "6 kB", "3.000", "-", "-", "3.000")
    assert picture.table.rows[-1] == ("total busy", "18 kB", "4.500", "0.000", "1.000", "7.000")
    assert "waiting 1 ms" in picture.alt


def test_nothing_recorded_makes_no_picture():
    assert timeline_picture([], []) is None
    assert timeline_picture([Span("pass", "", 0.0, 1.0)], []) is None
