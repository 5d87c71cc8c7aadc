"""The cache of routed experts: which leave first, how much is kept, what is read ahead, and errors that
arrive where they matter.
"""

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hfq.errors import CheckpointError
from hfq.offload.expert_cache import ExpertCache
from hfq.offload.reader_threads import Pool


class Expert(SimpleNamespace):
    """Stands for a packed module of so many bytes."""

    __hash__ = object.__hash__

    def __init__(self, name: str, nbytes: int) -> None:
        super().__init__(name=name, onload_device=None, infos={"weight": SimpleNamespace(nbytes=nbytes)})


@pytest.fixture
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


class Brought(dict):
    """A layer whose copy is done."""

    def has_failed(self):
        return False


def make(pool, budget: int, sizes=(10, 10, 10, 10)):
    """(cache, experts, the names that were read)."""
    experts, reads = [Expert(str(number), size) for number, size in enumerate(sizes)], []

    def read(expert):
        reads.append(expert.name)
        return Brought(weight=expert.name)

    return ExpertCache(read, pool, {None: budget}), experts, reads


def test_the_least_recently_used_leaves_first(pool):
    cache, (a, b, c, d), reads = make(pool, 30)
    for expert in (a, b, c, a, d):  # b is the oldest when d comes
        assert cache.fetch(expert) == {"weight": expert.name}
    assert list(cache._kept) == [c, a, d]
    assert (cache.hits, cache.misses, cache.nbytes) == (1, 4, 30)
    cache.fetch(b)
    assert reads == ["0", "1", "2", "3", "1"]


@pytest.mark.parametrize(("budget", "kept"), [(0, 0), (9, 0), (10, 1), (25, 2)])
def test_no_more_is_kept_than_the_budget(pool, budget, kept):
    cache, experts, reads = make(pool, budget)
    for _ in range(2):
        for expert in experts:
            cache.fetch(expert)
            assert cache.nbytes == sum(10 for _ in cache._kept) <= budget
    assert len(cache._kept) == kept
    assert len(reads) == 8


def test_one_that_is_larger_than_the_budget_drives_no_other_out(pool):
    cache, (small, large, *_), _ = make(pool, 20, (10, 30, 1, 1))
    cache.fetch(small)
    assert cache.fetch(large) == {"weight": "1"}
    assert list(cache._kept) == [small]


def test_what_is_read_ahead_is_there_and_counts_as_read(pool):
    cache, experts, reads = make(pool, 40)
    cache.prefetch(experts)
    assert [cache.fetch(expert)["weight"] for expert in experts] == ["0", "1", "2", "3"]
    assert sorted(reads) == ["0", "1", "2", "3"]
    assert (cache.hits, cache.misses) == (0, 4)
    cache.prefetch(experts)
    for expert in experts:
        cache.fetch(expert)
    assert (cache.hits, cache.misses, len(reads)) == (4, 4, 4)


def test_no_more_is_read_ahead_than_the_budget_holds(pool):
    cache, experts, reads = make(pool, 25)
    cache.prefetch(experts)
    assert len(cache._reading) == 2
    for expert in experts:
        cache.fetch(expert)
    assert sorted(reads) == ["0", "1", "2", "3"]
    empty, others, none = make(pool, 0)
    empty.prefetch(others)
    assert none == []


def test_what_is_there_is_not_driven_out_by_what_is_read_ahead_with_it(pool):
    cache, (a, b, c, d), reads = make(pool, 30)
    for expert in (a, b, c):
        cache.fetch(expert)
    cache.prefetch([a, d])
    assert (cache.fetch(d), cache.fetch(a)) == ({"weight": "3"}, {"weight": "0"})
    assert reads == ["0", "1", "2", "3"]


def test_an_error_reaches_the_fetch_of_that_expert_and_the_next_read_works(pool):
    cache, experts, _ = make(pool, 40)
    read, failing = cache._read, {"1", "2"}

    def fail(expert):
        if expert.name in failing:
            raise CheckpointError("The disk fails.", fix="check the disk")
        return read(expert)

    cache._read = fail
    cache.prefetch(experts)
    assert cache.fetch(experts[0]) == {"weight": "0"}
    with pytest.raises(CheckpointError, match="The disk fails"):
        cache.fetch(experts[1])
    cache._reading[experts[2]]._done.wait(20)
    failing.clear()
    cache.prefetch(experts)  # neither error is left over
    assert [cache.fetch(expert)["weight"] for expert in experts] == ["0", "1", "2", "3"]


def test_a_fetch_waits_for_the_read_that_is_under_way_and_does_not_read_twice(pool):
    cache, (expert, *_), reads = make(pool, 40)
    read, began, leave, found = cache._read, threading.Event(), threading.Event(), []

    def late(expert):
        began.set()
        assert leave.wait(20)
        return read(expert)

    cache._read = late
    cache.prefetch([expert])
    assert began.wait(20)
    thread = threading.Thread(target=lambda: found.append(cache.fetch(expert)))
    thread.start()
    assert found == []
    leave.set()
    thread.join(20)
    assert found == [{"weight": "0"}]
    assert reads == ["0"]


def test_after_the_pool_is_closed_nothing_waits_for_ever(pool):
    cache, experts, _ = make(pool, 40)
    pool.close()
    for _ in range(2):
        with pytest.raises(Exception, match="closed"):
            cache.prefetch(experts)
    assert cache.fetch(experts[0]) == {"weight": "0"}


def test_the_child_of_a_fork_forgets_what_was_being_read(pool):
    cache, experts, reads = make(pool, 40)
    cache.fetch(experts[0])
    cache._reading[experts[1]] = None  # of a thread that is no more
    cache.reset()
    assert cache.fetch(experts[1]) == {"weight": "1"}
    assert cache.fetch(experts[0]) == {"weight": "0"}
    assert reads == ["0", "1"]


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 20), min_size=2, max_size=6),
    st.integers(0, 60),
    st.lists(st.integers(0, 5), max_size=25),
)
def test_it_keeps_what_a_plain_list_would(sizes, budget, wishes):
    cache, experts, _ = make(Pool(2), budget, sizes)
    model: list[int] = []
    for number in (wish % len(sizes) for wish in wishes):
        was_there = number in model
        hits = cache.hits
        assert cache.fetch(experts[number]) == {"weight": str(number)}
        assert cache.hits == hits + was_there
        if sizes[number] <= budget:
            model = [other for other in model if other != number] + [number]
        while sum(sizes[other] for other in model) > budget:
            model.pop(0)
        assert [int(expert.name) for expert in cache._kept] == model
        assert cache.nbytes == sum(sizes[other] for other in model) <= budget
