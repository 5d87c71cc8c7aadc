"""The order of blocks: predicted over the wrap, learned from complete passes alone, and its errors
counted.
"""

import threading

from hypothesis import given
from hypothesis import strategies as st

from hfq.offload.prefetch_order import PrefetchOrder


def run(prefetch_order: PrefetchOrder, order, is_complete: bool = True) -> list[bool]:
    prefetch_order.begin()
    found = [prefetch_order.visit(unit) for unit in order]
    prefetch_order.end(is_complete)
    return found


def test_before_the_first_pass_the_order_is_that_of_the_modules():
    prefetch_order = PrefetchOrder(range(4))
    assert prefetch_order.expected(2) == [0, 1]
    assert prefetch_order.visit(0)
    assert prefetch_order.expected(2) == [1, 2]
    assert prefetch_order.expected(9) == [1, 2, 3, 0]


def test_after_the_last_block_comes_the_first():
    prefetch_order = PrefetchOrder(range(3))
    assert run(prefetch_order, [0, 1, 2]) == [True] * 3
    assert prefetch_order.expected(2) == [0, 1]
    assert (prefetch_order.prefetch_misses, prefetch_order.unit_forwards) == (0, 3)


def test_another_order_is_learned_from_one_pass():
    prefetch_order = PrefetchOrder(range(4))
    assert run(prefetch_order, [3, 2, 1, 0]) == [False] * 4
    assert run(prefetch_order, [3, 2, 1, 0]) == [True] * 4
    assert (prefetch_order.prefetch_misses, prefetch_order.unit_forwards) == (4, 8)


def test_after_a_skipped_block_the_order_is_taken_up_behind_it():
    prefetch_order = PrefetchOrder(range(5))
    assert run(prefetch_order, [0, 1, 3, 4]) == [True, True, False, True]
    assert prefetch_order.expected(9) == [0, 1, 3, 4]


def test_a_block_that_comes_twice_is_learned():
    prefetch_order = PrefetchOrder(range(3))
    assert run(prefetch_order, [0, 0, 1, 2]) == [True, False, True, True]
    assert run(prefetch_order, [0, 0, 1, 2]) == [True] * 4
    prefetch_order.visit(0)
    assert prefetch_order.expected(3) == [0, 1, 2]


def test_an_incomplete_pass_teaches_nothing_and_the_next_starts_at_the_front():
    prefetch_order = PrefetchOrder(range(4))
    run(prefetch_order, [2, 1], is_complete=False)
    prefetch_order.begin()
    assert prefetch_order.expected(4) == [0, 1, 2, 3]


def test_a_block_that_is_not_in_the_order_leaves_the_expectation():
    prefetch_order = PrefetchOrder(range(3))
    run(prefetch_order, [0, 2])
    prefetch_order.visit(0)
    assert not prefetch_order.visit(1)
    assert prefetch_order.expected(2) == [2, 0]


def test_visits_outside_of_a_pass_are_not_learned():
    prefetch_order = PrefetchOrder(range(3))
    prefetch_order.visit(2)
    prefetch_order.begin()
    prefetch_order.end(True)
    assert prefetch_order.expected(3) == [0, 1, 2]


def test_nothing_to_expect_without_blocks():
    prefetch_order = PrefetchOrder([])
    prefetch_order.begin()
    prefetch_order.end(True)
    assert prefetch_order.expected(2) == []


def test_each_thread_records_its_own_pass():
    prefetch_order, orders = PrefetchOrder(range(3)), {}
    barrier = threading.Barrier(2, timeout=20)

    def work(order):
        prefetch_order.begin()
        for unit in order:
            barrier.wait()
            prefetch_order.visit(unit)
        barrier.wait()
        orders[order] = list(prefetch_order._recorded[threading.get_ident()])
        prefetch_order.end(False)

    threads = [threading.Thread(target=work, args=(order,)) for order in [(0, 1, 2), (2, 1, 0)]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert orders == {(0, 1, 2): [0, 1, 2], (2, 1, 0): [2, 1, 0]}


def test_an_order_may_become_shorter_while_another_thread_visits():
    """The pass of another thread ends between any two steps; here, while the order is looked through."""
    prefetch_order = PrefetchOrder(range(4))

    class Shrinking(list):
        def __getitem__(self, index):
            prefetch_order._order = [0]
            return super().__getitem__(index)

    prefetch_order._order, prefetch_order._next = Shrinking(range(4)), 3
    prefetch_order.visit(2)
    prefetch_order._order, prefetch_order._next = Shrinking(range(4)), 3
    assert prefetch_order.expected(4) == [3, 0, 1, 2]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(6, 8))
def test_any_order_is_predicted_after_one_pass(order, count):
    prefetch_order = PrefetchOrder(range(count))
    run(prefetch_order, order)
    prefetch_order.begin()
    for position, unit in enumerate(order):
        upcoming = list(dict.fromkeys(order[position:] + order[:position]))
        assert prefetch_order.expected(count) == upcoming
        assert prefetch_order.visit(unit)
