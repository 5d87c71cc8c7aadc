"""What goes wrong while a model is streamed: each in a process of its own, which must end by an exception,
never by a signal.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest
import torch

from tests.support import tiny_models

ROOT, GPTQ = Path(__file__).parents[2], tiny_models.DATA / "tiny-llama-gptq"
PRELUDE = """
import errno, fcntl, gc, os, sys, threading, time
import torch
from transformers import AutoModelForCausalLM
import hfq
from hfq import CheckpointError, HfqConfig

file = folder + "/model.safetensors"
TOKENS = torch.arange(3, 9)[None]

def load(device_map={"": "disk"}, **options):
    config = HfqConfig(**{"disk_io": mode, **options})
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32, device_map=device_map)

def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(input_ids=tokens).logits

def streamer_of(model):
    return model.hf_quantizer.loading.offloader

def readers():
    return [thread for thread in threading.enumerate() if thread.name == "hfq-reader"]

def descriptors():
    return len(os.listdir("/proc/self/fd"))

def is_offloaded(model):
    return all(parameter.is_meta for parameter in model.parameters())

class Hold:
    "Holds reads of blocks until they are let go; `began` tells that one has begun."
    def __init__(self, model):
        self.began, self.leave, source = threading.Event(), threading.Event(), streamer_of(model).source
        self.source, self.read = source, source.read
        began, leave, read = self.began, self.leave, self.read
        def held(wanted, target):
            began.set()
            leave.wait(20)
            read(wanted, target)
        source.read = held

def in_flight(model):
    "Drops the first block and begins to read it again; the read is held."
    streamer_of(model).regions.drop(0)
    hold = Hold(model)
    assert streamer_of(model).regions.start(0, [])
    assert hold.began.wait(20)
    return hold

expected = logits(load(None))
"""
MODES = ["direct", "buffered"]
TIMEOUT = 60

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def finish(child: int) -> int:
    """The exit code of a process, negative where a signal ended it; one that hangs is killed."""
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
    """Everything that a forward imports is imported here, once, and not in every process; no reader thread is
    left.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    exec(PRELUDE + "logits(load())\n", {"folder": str(GPTQ), "mode": "direct"})
    gc.collect()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=MODES)
def run(request, tmp_path, imported):
    """run(script, returncode=0) → what a process wrote; its script finds `load`, `logits`, `expected` and the
    rest of the prelude.

    The process is a fork of this one, where everything is imported.
    """
    folder, errors = tmp_path / "model", tmp_path / "stderr"
    shutil.copytree(GPTQ, folder)

    def run(script: str, returncode: int = 0) -> str:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                written = os.open(errors, os.O_WRONLY | os.O_CREAT)
                os.dup2(written, 1), os.dup2(written, 2)
                os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = (
                    "1"  # torch's thread pool does not survive a fork either
                )
                # torch makes its pool anew in the first thread after a fork, and not safely in two at once
                alone = threading.Thread(target=torch.set_num_threads, args=(1,))
                alone.start()
                alone.join()
                exec(
                    compile(PRELUDE + script, "script", "exec"),
                    {"folder": str(folder), "mode": request.param},
                )
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
    text = run(
        """
model = load()
assert torch.equal(logits(model), expected)
streamer_of(model).regions.ticket_of(0).wait()
os.truncate(file, 4096)  # what the ring holds is served still
logits(model)
""",
        returncode=1,
    )
    last = text[text.rindex("hfq.errors.CheckpointError") :]
    assert "model.layers." in last or "lm_head" in last or "model.embed_tokens" in last
    assert "changed after it was validated" in last
    assert "model.safetensors" in last
    assert "Fix: " in last


def test_a_file_truncated_during_a_read_is_an_error_and_works_again_when_it_is_restored(run):
    run(
        """
content = open(file, "rb").read()
model, really, cuts = load(), os.preadv, []
def cut(descriptor, targets, offset):
    if threading.current_thread().name == "hfq-reader" and not cuts:
        cuts.append(offset)
        count = really(descriptor, [targets[0][:4096]], offset)
        os.truncate(file, offset + 4096)
        return count
    return really(descriptor, targets, offset)
os.preadv = cut
try:
    logits(model)
    raise SystemExit("no error")
except CheckpointError as error:
    assert "changed after it was validated" in str(error), error
assert cuts and is_offloaded(model)
with open(file, "r+b") as stream:
    stream.write(content)
assert torch.equal(logits(model), expected)
"""
    )


def test_a_failing_disk_names_the_block_and_the_next_forward_works(run):
    run(
        """
model, really = load(), os.preadv
def fail(descriptor, targets, offset):
    if threading.current_thread().name == "hfq-reader" and fail.is_on:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return really(descriptor, targets, offset)
os.preadv, fail.is_on = fail, True
for _ in range(2):
    try:
        logits(model)
        raise SystemExit("no error")
    except CheckpointError as error:
        assert "model.layers.0" in str(error) and "cannot be read any more" in str(error) and file in str(error), error
fail.is_on = False
assert torch.equal(logits(model), expected)
fail.is_on = True  # now while the next pass is read ahead, too
for _ in range(3):
    try:
        logits(model)
    except CheckpointError:
        pass
fail.is_on = False
assert torch.equal(logits(model), expected)
"""
    )


def test_short_and_interrupted_reads_do_no_harm(run):
    run(
        """
model, really, calls = load(), os.preadv, []
def short(descriptor, targets, offset):
    calls.append(offset)
    if len(calls) % 7 == 1 and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:  # Python itself tries the others again
        raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
    return really(descriptor, [targets[0][:8192]], offset)
os.preadv = short
assert torch.equal(logits(model), expected)
assert torch.equal(logits(model), expected)
assert len(calls) > 100
import signal
os.preadv = really
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
for _ in range(5):
    assert torch.equal(logits(model), expected)
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    )


def test_a_file_that_is_unlinked_or_replaced_goes_on_serving_its_old_bytes(run):
    run(
        """
model, late = load(), load()
assert torch.equal(logits(model), expected)
with open(folder + "/other", "wb") as stream:
    stream.write(bytes(os.path.getsize(file)))
os.replace(folder + "/other", file)
for _ in range(2):
    assert torch.equal(logits(model), expected)
os.unlink(file)
os.chmod(folder, 0)
for one in (model, late):
    assert torch.equal(logits(one), expected)
os.chmod(folder, 0o755)
"""
    )


@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_flipped_byte_is_found_where_reads_are_verified(run, verify):
    text = run(
        f"""
model = load(disk_checksum="{verify}")
if "{verify}" == "always":
    assert torch.equal(logits(model), expected)
    streamer_of(model).regions.ticket_of(0).wait(), streamer_of(model).regions.ticket_of(1).wait()
info = model.model.layers[2].mlp.up_proj.infos["qweight"].range
with open(file, "r+b") as stream:
    stream.seek(info.offset + 100)
    byte = stream.read(1)[0]
    stream.seek(info.offset + 100)
    stream.write(bytes([byte ^ 16]))
try:
    logits(model)
except CheckpointError:
    pass
logits(model)
""",
        returncode=1,
    )
    last = text[text.rindex("hfq.errors.CheckpointError") :]
    assert "model.layers.2: Bytes on disk changed" in last
    assert "model.safetensors" in last
    assert "CRC-32" in last


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "ValueError"])
def test_after_an_interrupt_or_an_exception_within_a_block_the_model_works(run, error):
    run(
        f"""
model = load()
for layer in (0, 3):
    def fail(*_):
        raise {error}("in a block")
    handle = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
    for _ in range(2):
        try:
            logits(model)
            raise SystemExit("no error")
        except {error}:
            assert is_offloaded(model)
    handle.remove()
    assert torch.equal(logits(model), expected)
def interrupted(*_):
    os.kill(os.getpid(), 2)
    time.sleep(0.01)
handle = model.model.layers[1].register_forward_pre_hook(interrupted)
try:
    logits(model)
    raise SystemExit("no error")
except KeyboardInterrupt:
    pass
handle.remove()
assert torch.equal(logits(model), expected)
"""
    )


def test_an_interrupt_while_a_block_is_waited_for_leaves_a_model_that_works(run):
    run(
        """
model = load()
hold = Hold(model)
def interrupt():
    hold.began.wait(20)
    os.kill(os.getpid(), 2)
    time.sleep(0.05)
    hold.leave.set()
threading.Thread(target=interrupt).start()
try:
    logits(model)
    raise SystemExit("no error")
except KeyboardInterrupt:
    pass
hold.leave.set()
for _ in range(3):
    assert torch.equal(logits(model), expected)
"""
    )


def test_two_threads_at_once_are_both_right(run):
    run(
        """
model, plain = load(), load(None)
batches = [torch.arange(3, 6 + number)[None] for number in range(2)]
rights = [logits(plain, batch) for batch in batches]
barrier, found = threading.Barrier(2), {0: [], 1: []}
def work(number):
    barrier.wait()
    for _ in range(8):
        found[number].append(torch.equal(logits(model, batches[number]), rights[number]))
threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
[thread.join(60) for thread in threads]
assert found == {0: [True] * 8, 1: [True] * 8}, found
"""
    )


def test_a_model_that_is_dropped_while_it_is_read_ahead_leaves_no_thread_and_no_descriptor(run):
    run(
        """
gc.collect()
assert not readers()
before = descriptors()
for _ in range(3):
    model = load()
    assert torch.equal(logits(model), expected)
    hold = in_flight(model)
    assert readers() and descriptors() > before
    leave = hold.leave
    del hold, model
    threading.Timer(0.05, leave.set).start()
    gc.collect()
    assert not readers(), readers()
    gc.collect()
    assert descriptors() == before, (descriptors(), before)
"""
    )


@pytest.mark.parametrize("is_in_flight", [True, False])
def test_both_sides_of_a_fork_compute_right_results(run, is_in_flight):
    run(
        f"""
model = load()
assert torch.equal(logits(model), expected)
if {is_in_flight}:
    hold = in_flight(model)
child = os.fork()
if {is_in_flight}:
    hold.source.read = hold.read
if child == 0:
    try:
        right = all(torch.equal(logits(model), expected) for _ in range(3))
        os._exit(0 if right and readers() else 1)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(2)
if {is_in_flight}:
    hold.leave.set()
assert all(torch.equal(logits(model), expected) for _ in range(3))
status = os.waitpid(child, 0)[1]
assert os.waitstatus_to_exitcode(status) == 0, status
"""
    )


@pytest.mark.slow  # a process of its own imports everything anew
def test_the_interpreter_ends_while_a_block_is_read_ahead():
    script = """
hold = in_flight(model := load())
threading.Timer(0.05, hold.leave.set).start()
"""
    start = f"folder, mode = {str(GPTQ)!r}, 'direct'\n"
    done = subprocess.run(
        [sys.executable, "-c", start + PRELUDE + script],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr


def test_a_closed_streamer_is_an_error_and_not_a_hang(run):
    run(
        """
model = load()
assert torch.equal(logits(model), expected)
streamer_of(model).close()
assert not readers()
for _ in range(3):
    try:
        logits(model)
        raise SystemExit("no error")
    except hfq.SetupError as error:
        assert "closed" in str(error), error
"""
    )
