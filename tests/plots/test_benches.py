"""Tests of charts that are read back from the JSON of benchmarks."""

import pytest

from hfq.errors import HfqError
from hfq.plots.charts import Lines
from hfq.plots.documents import read_section

LINES = Lines("Peak", "size, GB", "memory, GB", {"a": [(1.0, 2.0), (2.0, 4.0)], "b": [(1.0, 1.0)]})


def test_lines_are_drawn_and_described(write, result):
    section = read_section(write("memory", result("bench") | {"chart": LINES.to_dict()}))
    assert section.pictures
    text = str(list(section.pictures))
    assert "a: 1 → 2, 2 → 4; b: 1 → 1" in text


@pytest.mark.parametrize("series", [{}, {"a": [[1]]}, {"a": [[1, "x"]]}, {"a": 3}])
def test_lines_of_other_fields_raise_an_error(series, write, result):
    chart = LINES.to_dict() | {"series": series}
    with pytest.raises(HfqError, match=r"chart\.series"):
        read_section(write("memory", result("bench") | {"chart": chart}))
