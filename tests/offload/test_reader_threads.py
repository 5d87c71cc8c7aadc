"""Tickets and reader threads: errors, cancelling, closing; and what a source checks."""

import gc
import threading
import weakref

import pytest

from hfq.checkpoint import Checkpoint, Reader, write_safetensors
from hfq.checkpoint.direct_io import DirectFiles
from hfq.errors import CheckpointError, SetupError
from hfq.offload.byte_source import Source
from hfq.offload.reader_threads import JobGroups, Pool, Ticket
from hfq.tensor_spec import ByteRange

TIMEOUT = 20


@pytest.fixture
def pool():
    pool = Pool(2)
    yield pool
    pool.close()


def test_a_ticket_is_done_after_all_jobs_and_what_comes_last(pool):
    done = []
    ticket = pool.submit(Ticket([lambda n=n: done.append(n) for n in range(20)], lambda: done.append("last")))
    ticket.wait()
    assert done[-1] == "last"
    assert sorted(done[:-1]) == list(range(20))
    assert ticket.is_done


def test_a_ticket_without_jobs_is_done_at_once(pool):
    done = []
    ticket = pool.submit(Ticket([], lambda: done.append("last")))
    ticket.wait()
    assert done == ["last"]
    assert not pool._threads


def test_the_first_error_is_raised_and_later_jobs_and_the_last_step_are_left_out():
    pool, done = Pool(1), []

    def fail():
        raise ValueError("first")

    ticket = pool.submit(Ticket([fail, lambda: done.append(1)], lambda: done.append("last")))
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            ticket.wait()
    assert done == []
    pool.submit(Ticket([lambda: done.append(2)])).wait()
    assert done == [2]
    pool.close()


def test_an_error_in_the_last_step_is_raised(pool):
    def fail():
        raise ValueError("last")

    with pytest.raises(ValueError, match="last"):
        pool.submit(Ticket([lambda: None], fail)).wait()


def test_cancelling_waits_for_the_job_that_runs_and_drops_the_others():
    pool, began, leave, done = Pool(1), threading.Event(), threading.Event(), []

    def first():
        began.set()
        assert leave.wait(TIMEOUT)
        done.append("first")

    ticket = pool.submit(Ticket([first, lambda: done.append("second")], lambda: done.append("last")))
    assert began.wait(TIMEOUT)
    thread = threading.Thread(target=ticket.cancel)
    thread.start()
    while not ticket.is_cancelled:
        pass
    assert thread.is_alive()
    leave.set()
    thread.join(TIMEOUT)
    assert done == ["first"]
    assert ticket.is_done
    pool.close()


def hold_all(pool: Pool, threads: int) -> threading.Event:
    """Lets every thread of a pool wait for the event that it returns."""
    leave, began = threading.Event(), threading.Semaphore(0)

    def hold():
        began.release()
        assert leave.wait(TIMEOUT)

    pool.submit(Ticket([hold] * threads))
    for _ in range(threads):
        assert began.acquire(timeout=TIMEOUT)
    return leave


def test_guesses_run_behind_all_others_until_they_are_needed():
    pool, done = Pool(1), []
    leave = hold_all(pool, 1)
    guesses = [Ticket([lambda n=n: done.append(f"guess {n}")] * 2) for n in range(2)]
    for guess in guesses:
        pool.submit(guess, is_guess=True)
    tickets = [pool.submit(Ticket([lambda n=n: done.append(n)])) for n in range(2)]
    pool.submit(guesses[1])  # it is needed now
    leave.set()
    for ticket in (*tickets, *guesses):
        ticket.wait()
    assert done == [0, 1, "guess 1", "guess 1", "guess 0", "guess 0"]
    pool.close()


def test_guesses_take_half_of_the_threads():
    pool, running, leave = Pool(4), threading.Semaphore(0), threading.Event()

    def run():
        running.release()
        assert leave.wait(TIMEOUT)

    guesses = [pool.submit(Ticket([run]), is_guess=True) for _ in range(6)]
    assert running.acquire(timeout=TIMEOUT)
    assert running.acquire(timeout=TIMEOUT)
    pool.submit(Ticket([lambda: None])).wait()
    assert not running.acquire(timeout=0.05)
    leave.set()
    for guess in guesses:
        guess.wait()
    pool.close()


def test_a_ticket_can_be_withdrawn_until_a_job_of_it_starts():
    pool, done = Pool(1), []
    leave = hold_all(pool, 1)
    ticket = pool.submit(Ticket([lambda: done.append(1)] * 2), is_guess=True)
    assert ticket.withdraw()
    assert ticket.is_done
    started = pool.submit(Ticket([lambda: done.append(2)] * 2))
    leave.set()
    started.wait()
    assert not started.withdraw()
    assert not Ticket([]).withdraw()
    assert done == [2, 2]
    pool.close()


def test_closing_refuses_guesses():
    pool = Pool(1)
    leave = hold_all(pool, 1)
    guess = pool.submit(Ticket([lambda: None]), is_guess=True)
    closing = threading.Thread(target=pool.close)
    closing.start()
    with pytest.raises(SetupError, match="closed while it was read"):
        guess.wait()
    leave.set()
    closing.join(TIMEOUT)
    assert not closing.is_alive()


def test_closing_joins_the_threads_and_fails_what_had_not_begun():
    pool, began, leave = Pool(1), threading.Event(), threading.Event()

    def hold():
        began.set()
        assert leave.wait(TIMEOUT)

    running, waiting = pool.submit(Ticket([hold])), pool.submit(Ticket([lambda: None]))
    assert began.wait(TIMEOUT)
    threads = list(pool._threads)
    closing = threading.Thread(target=pool.close)
    closing.start()
    with pytest.raises(SetupError, match="closed while it was read"):
        waiting.wait()
    leave.set()
    closing.join(TIMEOUT)
    running.wait()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(SetupError, match="were closed"):
        pool.submit(Ticket([lambda: None]))
    pool.close()


def test_a_reader_may_close_its_own_pool():
    pool = Pool(2)
    pool.submit(Ticket([lambda: None])).wait()
    threads = list(pool._threads)
    pool.submit(Ticket([pool.close])).wait()
    for thread in threads:
        thread.join(TIMEOUT)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(SetupError):
        pool.submit(Ticket([lambda: None]))


def test_threads_keep_no_pool_and_no_job_alive():
    class Job:
        def __call__(self):
            pass

    pool, job = Pool(2), Job()
    kept = weakref.ref(job)
    pool.submit(Ticket([job])).wait()
    meeting = threading.Barrier(2, timeout=TIMEOUT)
    pool.submit(Ticket([meeting.wait] * 2)).wait()  # so each thread has left the job
    del job
    gc.collect()
    assert kept() is None
    threads, alone = list(pool._threads), weakref.ref(pool)
    closed = weakref.finalize(pool, lambda: None)
    del pool
    gc.collect()
    assert alone() is None
    assert not closed.alive
    assert all(thread.is_alive() for thread in threads)  # a streamer closes its pool; nothing else does
    jobs = threads[0]._args[0]
    for _ in threads:
        jobs.end_thread()
    for thread in threads:
        thread.join(TIMEOUT)


def test_a_failing_job_releases_its_thread_and_counts_as_busy_time(pool):
    def fail():
        raise ValueError("x")

    ticket = pool.submit(Ticket([fail] * 5))
    with pytest.raises(ValueError):
        ticket.wait()
    pool.submit(Ticket([lambda: None] * 5)).wait()
    assert pool.busy_seconds >= 0


@pytest.fixture
def source(tmp_path):
    """source(verify) → (a source, the ranges of two chunks, the file)."""
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"a": ("U8", (20_000,), bytes(range(250)) * 80)})
    chunks = [ByteRange(str(file), 0, 8192), ByteRange(str(file), 8192, 5000)]

    def make(verify):
        made = Source(Reader(Checkpoint.open(tmp_path)), "buffered", 0, verify)
        made.record(chunks, memoryview(bytearray(8192)))
        return made, chunks, file

    return make


def flip(file, offset: int) -> None:
    """Changes one byte, and leaves size and time of the file alone as a failing disk does."""
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def read(source, wanted) -> bytes:
    target = bytearray(8192)
    source.read(wanted, memoryview(target))
    return bytes(target[: wanted.nbytes])


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_flipped_byte_is_named_until_it_is_back(source, verify):
    made, (first, second), file = source(verify)
    flip(file, 9000)
    assert read(made, first) == file.read_bytes()[:8192]
    for _ in range(2):
        with pytest.raises(
            CheckpointError,
            match=r"(?s)changed after the model was loaded.*CRC-32.*5000 bytes from byte 8192",
        ):
            read(made, second)
    flip(file, 9000)
    assert read(made, second) == file.read_bytes()[8192:13192]


def test_always_checks_every_read_and_first_the_first_one(source):
    for verify, is_checked in (("always", True), ("first", False), ("off", False)):
        made, (first, _), file = source(verify)
        read(made, first)
        flip(file, 5000)
        if is_checked:
            with pytest.raises(CheckpointError):
                read(made, first)
        else:
            read(made, first)
        flip(file, 5000)


def test_what_is_recorded_is_not_counted_as_streamed(source):
    made, (first, second), _ = source("always")
    assert made.nbytes_read == 0
    read(made, first), read(made, second)
    assert made.nbytes_read == 13192


@pytest.mark.parametrize(
    ("asked", "available", "mapped", "mode"),
    [
        ("auto", 200, 0, "buffered"),
        ("auto", 199, 0, "direct"),
        ("auto", 250, 50, "buffered"),
        ("auto", 249, 50, "direct"),
        ("auto", 40, 50, "direct"),
        ("auto", None, 50, "buffered"),
        ("direct", 10**9, 0, "direct"),
        ("buffered", 0, 0, "buffered"),
    ],
)
def test_the_mode_follows_the_memory_that_is_there(source, monkeypatch, asked, available, mapped, mode):
    monkeypatch.setattr("hfq.offload.byte_source.available_memory", lambda: available)
    made = Source(source("off")[0].reader, asked, 100, mapped_nbytes=mapped)
    assert made.mode == mode
    if asked == "auto":
        monkeypatch.setattr("hfq.offload.byte_source.available_memory", lambda: 10**9)
        made.choose()
        assert made.mode == "buffered"


def test_direct_reads_that_a_file_system_does_not_take_are_said_once_and_reported_as_buffered(
    monkeypatch, source, caplog
):
    monkeypatch.setattr(DirectFiles, "supports_direct", lambda *_: False)
    made = Source(source("off")[0].reader, "direct", 100, names=["a file"])
    made.choose()
    assert made.mode == "buffered"
    assert [
        record.message for record in caplog.records if "no direct reads" in record.message
    ] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("possible", [0, 2])
def test_where_the_system_gives_few_threads_they_do_all_the_work(monkeypatch, possible):
    pool, done, started, start = Pool(4), [], [], threading.Thread.start

    def limited(thread):
        if len(started) == possible:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    ticket = pool.submit(Ticket([lambda: done.append(1)] * 9))
    if possible:
        ticket.wait()
        assert sum(done) == 9
    else:
        with pytest.raises(SetupError, match="No reader thread could be started"):
            ticket.wait()
    pool.close()


def test_jobs_of_several_tickets_are_done_together_except_those_that_have_begun():
    ran, asked = [], []
    tickets = [Ticket([lambda number=number: ran.append(number)]) for number in range(4)]
    assert tickets[1].withdraw()
    tickets[2].run_next()

    def do(group, begun):
        asked.append((group, begun))
        return True

    groups = JobGroups([[(ticket, 0) for ticket in tickets], [(Ticket([]), 0)]], do)
    groups.run_next()
    groups.run_next()
    assert asked == [(0, [0, 3])]
    assert ran == [2]
    assert all(ticket.is_done for ticket in tickets)
    assert [ticket.is_cancelled for ticket in tickets] == [False, True, False, False]


@pytest.mark.parametrize("error", [None, CheckpointError("Neither.", fix="-"), MemoryError()])
def test_jobs_that_cannot_be_done_together_run_one_by_one_with_errors_of_their_own(error):
    def do(group, begun):
        if error is not None:
            raise error
        return False

    ran = []
    tickets = [Ticket([lambda: ran.append(1)]), Ticket([lambda: 1 / 0]), Ticket([lambda: ran.append(2)])]
    pool = Pool(1)
    pool.submit_all([JobGroups([[(ticket, 0) for ticket in tickets]], do)])
    tickets[0].wait()
    tickets[2].wait()
    with pytest.raises(ZeroDivisionError):
        tickets[1].wait()
    assert ran == [1, 2]
    pool.close()


def test_tickets_that_wait_together_fail_when_the_pool_is_closed():
    pool, begun, leave = Pool(1), threading.Event(), threading.Event()

    def hold():
        begun.set()
        leave.wait(20)

    pool.submit(Ticket([hold]))
    assert begun.wait(20)
    tickets = [Ticket([lambda: None]) for _ in range(2)]
    pool.submit_all([JobGroups([[(ticket, 0) for ticket in tickets]], lambda *_: True)])
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    for ticket in tickets:
        with pytest.raises(SetupError, match="closed"):
            ticket.wait()
    leave.set()
    closing.join(20)
