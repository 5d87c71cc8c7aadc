"""Tests of the QMoE benchmark: its sizes, its rates, and a report without useful times."""

import math

import pytest

from benchmarks import qmoe


@pytest.mark.parametrize(("zeros", "bits"), [(0.5, 1.5), (1 / 3, math.log2(3)), (1.0, 0.0)])
def test_the_entropy_is_that_of_three_values(zeros, bits):
    assert qmoe.entropy(zeros) == pytest.approx(bits)


def test_below_its_rate_a_disk_makes_the_smaller_format_faster():
    bits, seconds = (0.75, 2.0), (4e-10, 1e-10)
    after, overlapped = qmoe.crossing_rates(bits, seconds)
    for rate, is_first in ((0.99, True), (1.01, False)):
        times = [each / 8 / (rate * after) + product for each, product in zip(bits, seconds, strict=True)]
        assert (times[0] < times[1]) is is_first
        times = [
            max(each / 8 / (rate * overlapped), product) for each, product in zip(bits, seconds, strict=True)
        ]
        assert (times[0] < times[1]) is is_first
    assert qmoe.crossing_rates(bits, seconds[::-1]) == (math.inf, math.inf)


def test_the_report_has_the_sizes_of_the_source(tmp_path):
    said = []
    report = qmoe.bench_qmoe(tmp_path, [1, 2], 1, True, said.append)
    assert {target.verdict for target in report.targets} == {"met"}
    size, speed, rates = report.tables
    assert [row[0] for row in size.rows] == ["0.5", "0.7", "0.885", "0.95"]
    expected = {0.5: (2.930, 2.951), 0.7: (1.685, 1.707), 0.885: (0.732, 0.754), 0.95: (0.592, 0.613)}
    for record in report.records[:4]:
        assert (record["codes"], record["with_rows"]) == pytest.approx(expected[record["p0"]], rel=0.02)
        assert record["entropy"] < record["codes"]
    assert len(said) == len(report.records) - 4 == 2 * len(speed.rows)
    assert [row[0] for row in rates.rows] == ["1", "2"]
    assert {row[0] for row in speed.rows} >= {"product, QMoE", "product, GPTQ, 2 bits", "decode, plain torch"}
