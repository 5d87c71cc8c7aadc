"""Passes over streamed blocks by hand: what the ring holds, what waits, and what both slow down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfq.placement.estimate.pipeline import FREE, SideBySide, Stage, pass_seconds

HALVED = SideBySide(0.5, 0.5)


def test_the_longer_of_reading_and_computing_where_all_is_streamed_and_nothing_is_shared():
    slow_disk = [Stage(1.0, 200)] * 8
    assert pass_seconds(slow_disk, 400, 100.0, FREE) == pytest.approx(16.0)
    assert pass_seconds(slow_disk, 400, 1000.0, FREE) == pytest.approx(8.0)


def test_what_rests_in_memory_is_computed_beside_no_more_reading_than_the_ring_holds():
    stages = [Stage(1.0)] * 4 + [Stage(1.0, 200)] * 4
    # a block takes 2 s to read: those in memory fill the ring with two of them; while the first computes
    # there is no room, while the
    # second and the third do, half of the next is read, and the other half is waited for
    assert pass_seconds(stages, 400, 100.0, FREE) == pytest.approx(4 + 4 + 1 + 1)
    assert pass_seconds(stages, 800, 100.0, FREE) == pytest.approx(
        8.0
    )  # all four stay in the ring: nothing is read


def test_two_that_halve_each_other_take_their_sum():
    stages = [Stage(1.0, 100)] * 6
    assert pass_seconds(stages, 200, 100.0, HALVED) == pytest.approx(12.0)
    assert pass_seconds(stages, 200, 100.0, SideBySide(1.0, 0.5)) > pass_seconds(stages, 200, 100.0, FREE)


def test_a_ring_that_holds_all_is_read_once():
    assert pass_seconds([Stage(1.0, 100)] * 2, 200, 1e-6, HALVED) == pytest.approx(2.0)


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(0, 100)), min_size=1, max_size=8),
    st.floats(1, 1e4),
    st.floats(0.1, 1),
    st.floats(0.1, 1),
    st.integers(200, 900),
)
def test_a_pass_is_never_shorter_than_computing_or_reading_nor_longer_than_one_after_the_other(
    parts, rate, share, other, buffer
):
    stages = [Stage(*part) for part in parts]
    computing, reading = sum(stage.seconds for stage in stages), sum(stage.nbytes for stage in stages) / rate
    found = pass_seconds(stages, buffer, rate, SideBySide(share, other))
    assert found >= computing * (1 - 1e-9)
    if sum(stage.nbytes for stage in stages) > buffer:
        assert found >= reading * (1 - 1e-6)
    assert found <= computing / share + reading / other + 1e-6
    assert pass_seconds(stages, buffer, rate, FREE) <= computing + reading + 1e-6
