"""Spans as plain data."""

from hfq.offload.spans import Span, overlap_levels


def test_no_two_spans_of_a_level_overlap():
    starts = [(0, 4), (1, 2), (1, 5), (2, 3), (4, 6), (5, 6)]
    assert overlap_levels(Span("read", "", *times) for times in starts) == [0, 1, 2, 1, 0, 1]
