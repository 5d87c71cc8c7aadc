"""Tests of the cache of routed experts: which are kept, how many bytes, reads ahead, threads, and errors."""

import contextlib
import random
import sys
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hfq.errors import CheckpointError, SetupError
from hfq.offload.experts.eviction import DecayedCounts
from tests.support.interruption import Interruption


def test_the_least_used_leaves_first_and_old_uses_count_less(build_experts):
    experts = build_experts(places=3)
    for number in (0, 1, 2, 0, 3):  # 1 was used as often as 2, but earlier
        experts.use(number)
    assert experts.kept() == [2, 3, 0]
    assert (experts.cache.hits, experts.cache.misses) == (1, 4)
    experts.use(1)  # it was used before, which still counts
    assert experts.kept() == [3, 0, 1]
    for _ in range(100):
        experts.use(2)
        experts.use(3)
    experts.use(4)  # the former uses of 0 and 1 are long ago
    assert experts.kept() == [4, 2, 3]


def test_a_call_of_more_experts_than_places_hits_what_is_used_most(build_experts):
    experts = build_experts(places=3)
    experts.places()._uses = DecayedCounts(16, period=3)
    for _ in range(6):
        for numbers in ([0, 1], [2, 3], [4, 5]):  # layers in a circle
            experts.use(*numbers)
    hits = experts.cache.hits
    for numbers in ([0, 1], [2, 3], [4, 5]):
        experts.use(*numbers)
    assert experts.cache.hits > hits


@pytest.mark.parametrize("places", [0, 1, 4, 5, 8, 20])
def test_the_memory_is_the_budget_or_what_a_token_is_routed_to_in_two_layers(build_experts, places):
    experts = build_experts(places, routed=2)
    memory = experts.places().memory
    count = min(max(places, 4), 8)
    assert memory.memory.numel() == memory.count * memory.place_nbytes == count * memory.place_nbytes
    for _ in range(2):
        for numbers in ([0], [1, 2], [*range(8)], [5, 7, 6, 1]):
            experts.use(*numbers, during=lambda _: experts.cache.nbytes <= experts.cache.budget or 1 / 0)
    assert experts.cache.budget == memory.memory.numel()
    assert len(experts.kept()) == count
    assert experts.are_free()


def test_a_budget_below_the_routed_experts_says_what_it_takes(build_experts, caplog):
    build_experts(places=0, routed=3)
    build_experts(places=6, routed=3)
    assert caplog.text == ""
    size = build_experts(places=5, routed=3).places().memory.place_nbytes
    assert f"cache of {5 * size:,} B is smaller than the 6 experts" in caplog.text
    assert f"it takes {6 * size:,} B" in caplog.text


@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_bytes_are_read_once_and_only_for_what_is_missing(build_experts, mode):
    experts = build_experts(places=8, mode=mode)
    experts.use(0, 1, 5)
    first = experts.offloader.source.nbytes_read
    experts.use(5, 1, 0)
    assert experts.offloader.source.nbytes_read == first
    sizes = [sum(run.lead + run.source.nbytes for run in each.layout.runs) for each in experts.cache.experts]
    assert first == sizes[0] + sizes[1] + sizes[5]
    experts.use(2)
    assert experts.offloader.source.nbytes_read == first + sizes[2]


def test_without_room_half_computes_while_the_other_half_is_read(build_experts):
    experts, ahead = build_experts(places=0, routed=2), []

    def during(part):
        if part == [0, 1]:
            for place in experts.places().places:
                place.contents.ticket.wait()
            ahead.extend(experts.kept())

    assert experts.use(*range(8), during=during) == [[0, 1], [2, 3], [4, 5, 6, 7]]
    assert ahead == [0, 1, 2, 3]


def test_what_a_call_needs_later_is_not_driven_out(build_experts):
    experts = build_experts(places=4)
    experts.use(4, 5, 6)
    experts.use(0)
    misses = experts.cache.misses
    experts.use(1, 2, 4, 5, 6)  # 4 and 5 have places; 0 leaves, and then 6, which is needed last
    assert experts.cache.misses - misses == 3
    assert experts.cache.hits == 2


def test_all_that_are_there_compute_together(build_experts):
    experts = build_experts(places=8)
    assert experts.use(*range(8)) == [[*range(8)]]
    assert experts.use(*range(8)) == [[*range(8)]]


def test_a_resident_expert_between_offloaded_ones_needs_no_place(build_experts):
    experts, parts = build_experts(places=2), []
    routed = [experts.layers[0], [], experts.layers[1], []]
    experts.cache.within(routed, lambda first, last, _: parts.append((first, last)))
    assert parts[0][0] == 0
    assert parts[-1][1] == 4
    assert experts.kept() == [0, 1]


def test_an_error_reaches_the_call_that_needs_the_expert_and_the_next_read_works(build_experts):
    experts = build_experts(places=4)
    read, failing = experts.offloader.source.read, {"is_on": True}

    def fail(wanted, target):
        if failing["is_on"] and wanted.offset // 4096 == bad // 4096:
            raise CheckpointError("The disk fails.", fix="check the disk")
        read(wanted, target)

    bad = experts.cache.experts[2].layout.runs[0].source.offset
    experts.offloader.source.read = fail
    with pytest.raises(CheckpointError, match=r"2: The disk fails"):
        experts.use(1, 2)
    assert experts.are_free()
    failing["is_on"] = False
    experts.use(2, 1, 3)
    assert experts.are_free()


def test_an_error_of_the_computation_frees_the_places(build_experts):
    experts = build_experts(places=2)
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            experts.use(*range(8), during=lambda part: 1 / 0)
        assert experts.are_free()
    experts.use(*range(8))


def test_a_layer_outside_of_a_call_gets_copies(build_experts):
    experts = build_experts(places=2)
    layer = experts.layers[3][0]
    found = layer.fetch()
    for number in range(8):
        experts.use(number)
    for name, expected in experts.expected[layer].items():
        assert torch.equal(found[name].view(torch.uint8), expected.view(torch.uint8))
    assert found["weight"].untyped_storage().data_ptr() != experts.places().memory.memory.data_ptr()


def test_a_call_within_another_never_waits_and_gets_its_bytes(build_experts):
    experts = build_experts(places=2)

    def inner(part):
        experts.check(7)  # of an expert that the call did not ask for
        experts.use(5, 6)
        experts.check(*part)

    experts.use(0, 1, during=inner)
    assert experts.are_free()


def test_threads_that_share_few_places_never_see_one_overwritten(build_experts):
    experts, errors = build_experts(places=3, threads=4), []
    switch = sys.getswitchinterval()

    def work(seed):
        order = random.Random(seed)
        try:
            for _ in range(60):
                numbers = sorted(order.sample(range(8), order.randint(1, 5)))
                experts.use(*numbers, during=lambda part: time.sleep(order.random() / 2000))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
    try:
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(switch)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    assert experts.are_free()


def test_two_threads_read_an_expert_once(build_experts):
    experts = build_experts(places=4)
    read, began, leave = experts.offloader.source.read, threading.Event(), threading.Event()

    def late(wanted, target):
        began.set()
        assert leave.wait(20)
        read(wanted, target)

    experts.offloader.source.read = late
    threads = [threading.Thread(target=experts.use, args=(1,), daemon=True) for _ in range(2)]
    threads[0].start()
    assert began.wait(20)
    threads[1].start()
    while experts.cache.hits == 0:
        time.sleep(0.001)
    leave.set()
    for thread in threads:
        thread.join(20)
    assert (experts.cache.hits, experts.cache.misses) == (1, 1)


def test_a_thread_waits_for_a_place_until_another_is_done(build_experts):
    experts, leave, inside, done = build_experts(places=2), threading.Event(), threading.Event(), []

    def hold(part):
        inside.set()
        assert leave.wait(20)

    holder = threading.Thread(target=lambda: experts.use(0, 1, during=hold), daemon=True)
    holder.start()
    assert inside.wait(20)
    waiter = threading.Thread(target=lambda: done.append(experts.use(2)), daemon=True)
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    leave.set()
    waiter.join(20)
    assert done == [[[2]]]


def test_after_the_offloader_is_closed_nothing_waits_without_end(build_experts):
    experts = build_experts(places=3)
    experts.use(0)
    experts.offloader.close()
    for _ in range(2):
        with pytest.raises(SetupError, match="closed"):
            experts.use(1)
    assert experts.are_free()
    experts.use(0)


def test_the_child_of_a_fork_forgets_what_was_being_read(build_experts):
    experts = build_experts(places=4)
    experts.use(0)
    read = experts.offloader.source.read
    experts.offloader.source.read = lambda *_: time.sleep(60)

    def leave(*_):
        raise ZeroDivisionError

    experts.cache._onload = leave  # its read goes on
    with pytest.raises(ZeroDivisionError):
        experts.use(1)
    del experts.cache._onload
    experts.offloader.source.read = read
    assert experts.kept() == [0, 1]
    experts.offloader.pool._reset()  # as in a child, which has no reader threads
    experts.offloader.reset_after_fork()
    assert experts.kept() == [0]
    experts.use(1, 0)
    assert experts.cache.hits == 1


def test_after_an_interrupt_at_any_line_the_next_call_is_right(build_experts):
    experts = build_experts(places=3)

    def work():
        experts.use(0, 1, 2)
        experts.use(2, 3, 4, 5)

    whole = Interruption()
    work()
    whole.run(work)
    places = {line: index for index, line in enumerate(whole.lines)}
    assert len(places) > 60
    for line, index in places.items():
        with contextlib.suppress(KeyboardInterrupt):
            Interruption(index).run(work)
        assert experts.are_free(), line
        work()
        assert len(experts.places().places) == 3
        assert experts.are_free(), line


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(2, 6), st.lists(st.integers(0, 7), max_size=20))
def test_it_keeps_what_a_plain_list_would(build_experts, places, wishes):
    experts, kept, uses = build_experts(places), [], {}
    for call, number in enumerate(wishes):
        hits, is_there = experts.cache.hits, number in kept
        experts.use(number)
        assert experts.cache.hits == hits + is_there
        uses.setdefault(number, []).append(call)
        others = [other for other in kept if other != number]
        others.sort(key=lambda other: (sum(2 ** (use / 16) for use in uses[other]), -max(uses[other])))
        kept = [*others[max(0, len(others) + 1 - places) :], number]
        assert sorted(experts.kept()) == sorted(kept)
