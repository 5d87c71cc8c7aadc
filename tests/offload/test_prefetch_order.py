"""The order of blocks: predicted over the wrap, learned from complete passes alone, and its errors
counted.
"""

import threading

from hypothesis import given
from hypothesis import strategies as st

from hfq.offload.prefetch_order import PrefetchOrder


def run(schedule: PrefetchOrder, order, is_complete: bool = True) -> list[bool]:
    schedule.begin()
    found = [schedule.visit(unit) for unit in order]
    schedule.end(is_complete)
    return found


def test_before_the_first_pass_the_order_is_that_of_the_modules():
    schedule = PrefetchOrder(range(4))
    assert schedule.expected(2) == [0, 1]
    assert schedule.visit(0)
    assert schedule.expected(2) == [1, 2]
    assert schedule.expected(9) == [1, 2, 3, 0]


def test_after_the_last_block_comes_the_first():
    schedule = PrefetchOrder(range(3))
    assert run(schedule, [0, 1, 2]) == [True] * 3
    assert schedule.expected(2) == [0, 1]
    assert (schedule.prefetch_misses, schedule.unit_forwards) == (0, 3)


def test_another_order_is_learned_from_one_pass():
    schedule = PrefetchOrder(range(4))
    assert run(schedule, [3, 2, 1, 0]) == [False] * 4
    assert run(schedule, [3, 2, 1, 0]) == [True] * 4
    assert (schedule.prefetch_misses, schedule.unit_forwards) == (4, 8)


def test_after_a_skipped_block_the_order_is_taken_up_behind_it():
    schedule = PrefetchOrder(range(5))
    assert run(schedule, [0, 1, 3, 4]) == [True, True, False, True]
    assert schedule.expected(9) == [0, 1, 3, 4]


def test_a_block_that_comes_twice_is_learned():
    schedule = PrefetchOrder(range(3))
    assert run(schedule, [0, 0, 1, 2]) == [True, False, True, True]
    assert run(schedule, [0, 0, 1, 2]) == [True] * 4
    schedule.visit(0)
    assert schedule.expected(3) == [0, 1, 2]


def test_an_incomplete_pass_teaches_nothing_and_the_next_starts_at_the_front():
    schedule = PrefetchOrder(range(4))
    run(schedule, [2, 1], is_complete=False)
    schedule.begin()
    assert schedule.expected(4) == [0, 1, 2, 3]


def test_a_block_that_is_not_in_the_order_leaves_the_expectation():
    schedule = PrefetchOrder(range(3))
    run(schedule, [0, 2])
    schedule.visit(0)
    assert not schedule.visit(1)
    assert schedule.expected(2) == [2, 0]


def test_visits_outside_of_a_pass_are_not_learned():
    schedule = PrefetchOrder(range(3))
    schedule.visit(2)
    schedule.begin()
    schedule.end(True)
    assert schedule.expected(3) == [0, 1, 2]


def test_nothing_to_expect_without_blocks():
    schedule = PrefetchOrder([])
    schedule.begin()
    schedule.end(True)
    assert schedule.expected(2) == []


def test_each_thread_records_its_own_pass():
    schedule, orders = PrefetchOrder(range(3)), {}
    barrier = threading.Barrier(2, timeout=20)

    def work(order):
        schedule.begin()
        for unit in order:
            barrier.wait()
            schedule.visit(unit)
        barrier.wait()
        orders[order] = list(schedule._recorded[threading.get_ident()])
        schedule.end(False)

    threads = [threading.Thread(target=work, args=(order,)) for order in [(0, 1, 2), (2, 1, 0)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert orders == {(0, 1, 2): [0, 1, 2], (2, 1, 0): [2, 1, 0]}


def test_an_order_may_become_shorter_while_another_thread_visits():
    """The pass of another thread ends between any two steps; here, while the order is looked through."""
    schedule = PrefetchOrder(range(4))

    class Shrinking(list):
        def __getitem__(self, index):
            schedule._order = [0]
            return super().__getitem__(index)

    schedule._order, schedule._next = Shrinking(range(4)), 3
    schedule.visit(2)
    schedule._order, schedule._next = Shrinking(range(4)), 3
    assert schedule.expected(4) == [3, 0, 1, 2]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(6, 8))
def test_any_order_is_predicted_after_one_pass(order, count):
    schedule = PrefetchOrder(range(count))
    run(schedule, order)
    schedule.begin()
    for position, unit in enumerate(order):
        upcoming = list(dict.fromkeys(order[position:] + order[:position]))
        assert schedule.expected(count) == upcoming
        assert schedule.visit(unit)
