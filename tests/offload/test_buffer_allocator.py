"""The two-ended ring: places worked out by hand, and what must hold whatever is asked of it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfq.offload.buffer_allocator import BufferAllocator
from hfq.placement.budget import buffer_nbytes

PAGE = 4096


def place(ring: BufferAllocator, unit: int, nbytes: int, kept=()) -> int | None:
    """Gives a block a place as the streamer does; its offset, or None."""
    found = ring.find(unit, nbytes, kept)
    if found is None:
        return None
    for other in found[1]:
        ring.forget(other)
    ring.give(unit, found[0], nbytes)
    return found[0]


@pytest.mark.parametrize(
    ("sizes", "nbytes"),
    [([], 0), ([5], 5), ([5, 3], 8), ([1, 2, 3], 5), ([1, 1, 1, 9], 10), ([9, 1, 1, 8], 17)],
)
def test_the_ring_holds_the_two_largest_neighbours_over_the_wrap(sizes, nbytes):
    assert buffer_nbytes(sizes) == nbytes


def test_places_alternate_between_the_two_ends():
    ring = BufferAllocator(3 * PAGE)
    assert place(ring, 0, PAGE) == 0
    assert place(ring, 1, 2 * PAGE, kept=[0]) == PAGE
    assert place(ring, 2, PAGE, kept=[1]) == 0
    assert (ring.place_of(0), ring.place_of(1), ring.place_of(2)) == (None, PAGE, 0)


def test_the_place_that_costs_the_fewest_blocks_is_taken():
    ring = BufferAllocator(4 * PAGE)
    assert place(ring, 0, PAGE) == 0
    assert ring.find(1, 2 * PAGE, []) == (2 * PAGE, [])
    assert ring.find(1, 4 * PAGE, []) == (0, [0])


def test_no_room_beside_what_is_kept_changes_nothing():
    ring = BufferAllocator(3 * PAGE)
    place(ring, 0, 2 * PAGE)
    assert ring.find(1, 2 * PAGE, [0]) is None
    assert ring.find(1, 4 * PAGE, []) is None
    assert (ring.place_of(0), ring.place_of(1)) == (0, None)


def test_forgotten_blocks_free_their_place():
    ring = BufferAllocator(2 * PAGE)
    place(ring, 0, PAGE)
    place(ring, 1, PAGE)
    ring.forget(0)
    ring.forget(7)
    assert ring.find(2, PAGE, [1]) == (0, [])
    ring.clear()
    assert ring.find(2, 2 * PAGE, [0, 1]) == (0, [])


sizes_in_pages = st.lists(st.integers(0, 9).map(lambda pages: pages * PAGE), min_size=1, max_size=7)


@given(
    sizes_in_pages,
    st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(0, 6), max_size=2)), max_size=40),
)
def test_kept_blocks_are_never_overlapped_and_places_never_overlap(sizes, wishes):
    ring, size_of = BufferAllocator(buffer_nbytes(sizes)), dict(enumerate(sizes))
    for unit, kept in ((unit % len(sizes), kept) for unit, kept in wishes):
        kept = {other for other in kept if other != unit and other in size_of}
        before = {other: ring.place_of(other) for other in size_of}
        found = place(ring, unit, size_of[unit], kept)
        after = {other: ring.place_of(other) for other in size_of if ring.place_of(other) is not None}
        assert found == (after.get(unit) if found is not None else None)
        assert all(ring.place_of(other) == before[other] for other in kept)
        spans = sorted((start, start + size_of[other]) for other, start in after.items() if size_of[other])
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))
        assert all(
            start % PAGE == 0 and start + size_of[other] <= ring.nbytes for other, start in after.items()
        )


@given(sizes_in_pages, st.integers(0, 6), st.integers(1, 3))
def test_in_a_cyclic_order_every_block_finds_room_beside_the_one_before(sizes, first, rounds):
    ring, count = BufferAllocator(buffer_nbytes(sizes)), len(sizes)
    for step in range(first, first + rounds * count + 1):
        unit, before = step % count, (step - 1) % count
        if ring.place_of(unit) is None or count < 2:
            assert place(ring, unit, sizes[unit], {before} - {unit}) is not None
        assert step == first or ring.place_of(before) is not None
