"""Tests of records: selection, medians, and rotated orders."""

from benchmarks.records import median, rotated, select

RECORDS = [{"kind": "a", "seconds": value, "nbytes": 2} for value in (5, 1, 3)] + [
    {"kind": "a", "error": "x"},
    {"kind": "b"},
]


def test_medians_leave_failures_out():
    assert len(select(RECORDS, kind="a")) == 3
    assert median(RECORDS, lambda record: record["seconds"] / record["nbytes"], kind="a") == 1.5
    assert median(RECORDS, lambda record: record["seconds"], kind="b") is None
    assert median(RECORDS, lambda record: record["seconds"], kind="c") is None


def test_every_name_comes_first_once():
    assert [rotated(["x", "y", "z"], by)[0] for by in range(4)] == ["x", "y", "z", "x"]
    assert rotated([], 2) == []
