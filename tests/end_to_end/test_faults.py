"""Tests of faults while a model is offloaded.

Each process must end by an exception, never by a signal.
"""

import gc
import os
import runpy
import shutil
import signal
import sys
import threading
import time
import traceback

import pytest
import torch

from tests.support import programs, tiny_models

GPTQ = tiny_models.DATA / "tiny-llama-gptq"
MODES = ["direct", "buffered"]
TIMEOUT = 240

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def finish(child: int) -> int:
    """Returns the exit code of a process, negative for a signal; kills a process that hangs."""
    for _ in range(TIMEOUT * 20):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGKILL


@pytest.fixture(scope="module")
def imported():
    """Imports everything that a forward pass needs once, instead of in every process.

    Leaves no reader thread behind.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tools", str(GPTQ), "direct"])
        names = runpy.run_path(str(programs.path("faults/tools")))
    names["logits"](names["load"]())
    del names
    gc.collect()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=MODES)
def run(request, tmp_path, imported):
    """run(program of tests/programs/faults, arguments, returncode=0) → output of its process.

    The process is a fork of this one, which has imported everything.
    """
    folder, errors = tmp_path / "model", tmp_path / "stderr"
    shutil.copytree(GPTQ, folder)

    def run(program: str, *arguments: object, returncode: int = 0) -> str:
        path = str(programs.path(f"faults/{program}"))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                written = os.open(errors, os.O_WRONLY | os.O_CREAT)
                os.dup2(written, 1), os.dup2(written, 2)
                os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = (
                    "1"  # torch's thread pool does not survive a fork either
                )
                # torch creates its pool in the first thread after a fork, which is not safe in two threads
                alone = threading.Thread(target=torch.set_num_threads, args=(1,))
                alone.start()
                alone.join()
                sys.argv = [path, str(folder), request.param, *map(str, arguments)]
                runpy.run_path(path)
                code = 0
            except BaseException:
                os.write(2, traceback.format_exc().encode())
            finally:
                os._exit(code)
        found = finish(child)
        text = errors.read_text(errors="replace")
        assert found == returncode, text[-3000:]
        return text

    return run


def test_a_truncated_file_ends_in_a_named_error_and_not_in_a_signal(run):
    text = run("truncated_file", returncode=1)
    last = text[text.rindex("hfq.errors.CheckpointError") :]
    assert "changed while the model was using it" in last
    assert "model.safetensors" in last
    assert "Fix: " in last


def test_a_file_truncated_during_a_read_is_an_error_and_works_again_when_it_is_restored(run):
    run("truncated_during_read")


def test_a_failing_disk_names_the_block_and_the_next_forward_works(run):
    run("failing_disk")


def test_short_and_interrupted_reads_do_no_harm(run):
    run("short_reads")


def test_a_file_that_is_unlinked_or_replaced_goes_on_serving_its_old_bytes(run):
    run("replaced_file")


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_flipped_byte_is_found_where_reads_are_verified(run, verify):
    text = run("flipped_byte", verify, returncode=1)
    last = text[text.rindex("hfq.errors.CheckpointError") :]
    assert "model.layers.2: Bytes on disk changed" in last
    assert "model.safetensors" in last
    assert "CRC-32" in last


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError"])
def test_after_an_interrupt_or_an_exception_within_a_block_the_model_works(run, error):
    run("exception_in_layer", error)


def test_an_interrupt_while_a_block_is_waited_for_leaves_a_model_that_works(run):
    run("interrupt_while_waiting")


def test_two_threads_at_once_are_both_right(run):
    run("two_threads")


def test_a_model_that_is_dropped_while_it_is_read_ahead_leaves_no_thread_and_no_descriptor(run):
    run("dropped_while_prefetching")


@pytest.mark.parametrize("is_in_flight", [True, False])
def test_both_sides_of_a_fork_compute_right_results(run, is_in_flight):
    run("fork", is_in_flight)


@pytest.mark.slow  # a new process imports everything again
def test_the_interpreter_ends_while_a_block_is_read_ahead():
    done = programs.run("faults/end_while_prefetching", GPTQ, "direct", timeout=TIMEOUT, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


def test_a_closed_streamer_is_an_error_and_not_a_hang(run):
    run("closed_offloader")
