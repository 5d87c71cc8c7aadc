"""Tests of labels next to points: no overlap, and within the edges if there is room."""

import random

import pytest

from hfq.plots.chart_labels import choose_places

FRAME = (0.0, 0.0, 400.0, 200.0)


def boxes(places, widths):
    return [(x, y, x + width, y + 10) for (x, y), width in zip(places, widths, strict=True)]


def meet(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@pytest.mark.parametrize(
    "points",
    [
        [(200, 100)] * 5,
        [(390, 100), (395, 103), (10, 195), (5, 5)],
        [tuple(random.Random(seed).uniform(20, 180) for _ in range(2)) for seed in range(8)],
    ],
    ids=["all in one place", "at the edges", "anywhere"],
)
def test_names_keep_clear_of_each_other_and_of_the_edge(points):
    widths = [30 + 7 * place for place in range(len(points))]
    found = boxes(choose_places(points, widths, FRAME), widths)
    assert not any(meet(one, other) for place, one in enumerate(found) for other in found[place + 1 :])
    assert all(box[0] >= 0 and box[2] <= 400 for box in found)
    assert not any(box[0] < x < box[2] and box[1] < y < box[3] for box in found for x, y in points)


def test_where_there_is_room_a_name_stands_to_the_right():
    assert choose_places([(100.0, 100.0)], [30.0], FRAME) == [(105.0, 95.0)]
