"""Parts of a product on threads of their own: each is done once, in the caller's modes, and what it raises is raised."""

import signal
import threading
import time

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hfq.formats.codecs.thread_buffers import release_buffers, thread_buffer
from hfq.kernels.cpp.openmp_team import team
from hfq.kernels.cpu import thread_team

PATIENCE = 60.0  # seconds; members of a team meet at once

needs_team = pytest.mark.skipif(team() is None, reason="torch was built without OpenMP")


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("multiples", [(1,), (128, 32), (128, 32, 1), (96, 3)])
@pytest.mark.parametrize("most", [1, 100, 512])
@pytest.mark.parametrize("count", [0, 1, 127, 384, 768, 1024, 4096, 11008])
def test_parts_cover_everything_once_and_are_even(count, most, multiples, threads):
    parts, least = thread_team.divide(count, most, multiples, threads), multiples[-1]
    assert [number for part in parts for number in part] == list(range(count))
    assert all(0 < len(part) <= max(most, least) for part in parts)
    assert all(part.start % least == 0 for part in parts)
    if count >= threads * least:
        assert len(parts) >= threads
        assert max(map(len, parts)) - min(map(len, parts[:-1] or parts)) <= multiples[0]


@pytest.mark.parametrize(
    ("count", "threads", "expected"),
    [(4096, 1, [512] * 8), (384, 2, [192, 192]), (640, 4, [160] * 4), (1024, 16, [64] * 16), (768, 2, [384, 384])],
)
def test_parts_are_of_whole_blocks_where_those_are_even(count, threads, expected):
    assert [len(part) for part in thread_team.divide(count, 512, (128, 32, 1), threads)] == expected


@needs_team
def test_parts_are_worked_on_at_once():
    meeting = threading.Barrier(3)
    found = []

    def work(part):
        meeting.wait(PATIENCE)
        found.append((part, threading.get_ident()))

    thread_team.for_each(work, [5, 6, 7], 3)
    assert {part for part, _ in found} == {5, 6, 7}
    assert len({thread for _, thread in found}) == 3
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("parts", "threads"), [(range(1), 3), (range(5), 1), ([], 3)])
def test_what_is_not_shared_is_worked_on_by_the_caller(parts, threads):
    found = []
    thread_team.for_each(lambda part: found.append((part, threading.get_ident())), parts, threads)
    assert found == [(part, threading.get_ident()) for part in parts]


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_every_part_is_in_the_callers_modes(inference, grad):
    found, meeting = [], threading.Barrier(3 if team() is not None else 1)

    def work(part):
        meeting.wait(PATIENCE)
        found.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        thread_team.for_each(work, range(3), 3)
    assert found == [(inference, grad)] * 3


@needs_team
def test_each_thread_has_buffers_which_the_caller_keeps():
    meeting = threading.Barrier(3)

    def places():
        found = []

        def work(part):
            place = thread_buffer("panel", torch.float32, torch.device("cpu"), 1 << 16).data_ptr()
            meeting.wait(PATIENCE)
            found.append(place)

        thread_team.for_each(work, range(3), 3)
        return set(found)

    release_buffers()
    first = places()
    assert len(first) == 3
    assert thread_buffer("panel", torch.float32, torch.device("cpu"), 1).data_ptr() in first
    assert places() == first
    release_buffers()
    assert thread_buffer("panel", torch.float32, torch.device("cpu"), 8).untyped_storage().nbytes() == 32


@needs_team
def test_after_an_error_other_parts_do_not_begin():
    begun, meeting = [], threading.Barrier(3)

    def work(part):
        begun.append(part)
        meeting.wait(PATIENCE)
        raise ValueError(f"of part {part}")

    with pytest.raises(ValueError, match=r"of part [012]"):
        thread_team.for_each(work, range(9), 3)
    assert sorted(begun) == [0, 1, 2]
    thread_team.for_each(begun.append, [7, 8, 9], 3)  # and nothing is left behind
    assert sorted(begun) == [0, 1, 2, 7, 8, 9]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_is_the_one_that_a_part_raised(error, threads):
    def work(part):
        if part == 2:
            raise error("of part 2")

    with pytest.raises(error, match="of part 2"):
        thread_team.for_each(work, range(5), threads)


@needs_team
def test_what_an_interrupt_kept_from_being_done_is_no_result(monkeypatch):
    monkeypatch.setattr(thread_team, "_GOMP_PARALLEL", lambda address: lambda *arguments: None)
    with pytest.raises(KeyboardInterrupt):
        thread_team.for_each(print, range(3), 3)


class Stop(Exception):
    """What a signal's handler raises."""


@needs_team
def test_a_handler_of_a_signal_raises_wherever_it_comes():
    """Also before a member's first line, where ctypes would print what it raises, and go on."""
    handled, raised, begun, before = [], 0, 0, signal.getsignal(signal.SIGALRM)

    def handle(number, frame):
        handled.append(number)
        raise Stop

    def work(part):
        end = time.perf_counter() + 2e-5
        while time.perf_counter() < end:
            pass

    signal.signal(signal.SIGALRM, handle)
    try:
        while begun < 200:
            try:
                while begun < 200:
                    begun += 1
                    signal.setitimer(signal.ITIMER_REAL, 20e-6 + begun * 2e-6)
                    thread_team.for_each(work, range(3), 3)
                signal.setitimer(signal.ITIMER_REAL, 0)
                time.sleep(0.01)  # another thread may have the last one, and not have run yet
            except Stop:
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert handled
    assert raised == len(handled)


def test_a_weight_is_shared_by_as_many_threads_as_have_something_to_do():
    enough, all_threads = thread_team.LEAST_NUMEL, 3 if team() is not None else 1
    assert thread_team.members(1024, enough // 1024) == all_threads
    assert thread_team.members(1024, enough // 1024 - 1) == 1
    assert thread_team.members(64, enough) == min(all_threads, 2)
    assert thread_team.members(32, enough) == 1
    with TorchDispatchMode():  # which watches one thread's operations
        assert thread_team.members(1024, enough) == 1
    if torch.set_flush_denormal(True):
        try:
            assert thread_team.members(1024, enough) == 1
        finally:
            torch.set_flush_denormal(False)
