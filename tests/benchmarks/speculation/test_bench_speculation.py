"""Tests of the speculation benchmark on small models: counters and identical tokens, without useful times."""

import pytest

from benchmarks.speculation import bench_speculation as bench
from benchmarks.speculation.bench_speculation import DRAFTS, PLACES, bench_speculation

TABLES = [*(place.capitalize() for place in PLACES), "Identical tokens"]


@pytest.mark.exhaustive
def test_all_drafts_are_counted_and_change_no_token(tmp_path):
    said = []
    report = bench_speculation(tmp_path, 1, True, said.append)
    assert [table.title for table in report.tables] == TABLES
    assert all([row[0] for row in table.rows] == list(DRAFTS) for table in report.tables)
    assert {target.verdict for target in report.targets} == {"met"}
    for record in report.records:
        assert record["passes"] <= record["tokens"] == 16
        assert record["nbytes_read"] > 0
    again = bench_speculation(tmp_path, 1, True, said.append)
    assert [each["passes"] for each in again.records] == [each["passes"] for each in report.records]
    assert sum("step 1 of" in line for line in said) == 3  # models are kept between runs


def test_a_report_divides_counters_by_tokens():
    counters = {"round": 0, "tokens": 40, "passes": 10, "nbytes_read": 20_000_000, "seconds": 2.0}
    kinds = [(place, "float32", 1.0) for place in PLACES] + [("layers on disk", "bfloat16", 0.5)]
    records = [
        {"place": place, "dtype": dtype, "drafts": drafts, "identical": identical, **counters}
        for place, dtype, identical in kinds
        for drafts in DRAFTS
    ]
    report = bench._report({}, records)
    for table in report.tables[:2]:
        assert table.rows == [(drafts, "0.250", "0.500", "20.0", "1.00") for drafts in DRAFTS]
    assert report.tables[2].rows == [(drafts, "1.00", "0.50") for drafts in DRAFTS]
    assert {target.verdict for target in report.targets} == {"met"}
    assert bench._report({}, [{**each, "identical": 0.9} for each in records]).targets[0].verdict == "not met"
