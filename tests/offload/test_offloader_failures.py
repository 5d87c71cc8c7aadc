"""After whatever goes wrong in a block, its parts are gone, the lock is free, and the next forward is
right.
"""

import copy
import inspect
import os
import threading

import pytest
import torch

from hfq.errors import CheckpointError, SetupError
from hfq.offload.offloader import OffloadOptions

SIZE = 64


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_another_thread(work, timeout: float = 20):
    """The result of `work`, or the exception it raised; fails where it hangs."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout)
    assert outcome, "the thread hangs"
    return outcome[0]


@pytest.mark.parametrize("index", [0, 1, 3])
def test_after_an_exception_in_the_forward_all_is_on_meta_and_the_lock_is_free(build, index):
    stack, activations = build(), random(3, SIZE)
    expected = stack.model(activations)

    def probe(layer):
        raise ValueError("from the model's own code")

    stack.model[index].probe = probe
    for _ in range(2):
        with pytest.raises(ValueError, match="from the model's own code"):
            stack.model(activations)
        assert stack.is_offloaded()
    stack.model[index].probe = lambda layer: None
    assert torch.equal(in_another_thread(lambda: stack.model(activations)), expected)
    assert torch.equal(stack.model(activations), expected)


def test_an_interrupt_leaves_the_lock_free_for_another_thread(build):
    stack, activations = build(), random(3, SIZE)
    expected = stack.model(activations)

    def probe(layer):
        layer.probe = lambda layer: None
        raise KeyboardInterrupt

    stack.model[0].probe = probe
    with pytest.raises(KeyboardInterrupt):
        stack.model(activations)
    assert stack.is_offloaded()
    assert torch.equal(in_another_thread(lambda: stack.model(activations)), expected)


def test_a_streamer_cannot_be_copied_since_its_blocks_would_stay_behind(build):
    with pytest.raises(SetupError, match="cannot be copied"):
        copy.deepcopy(build().offloader)


def test_a_copy_of_one_block_is_refused_or_computes_with_its_own_modules(build):
    stack, seen = build(), []
    try:
        copied = copy.deepcopy(stack.model[0])
    except SetupError:
        return
    copied.probe, stack.model[0].probe = (
        (lambda layer: seen.append("copy")),
        (lambda layer: seen.append("original")),
    )
    copied(random(3, SIZE))
    assert seen == ["copy"]


def test_a_block_keeps_the_signature_of_its_forward(build):
    assert inspect.signature(build().model[0].forward) == inspect.signature(
        build(offload=False).model[0].forward
    )


def test_an_exception_in_an_earlier_hook_of_the_block_leaves_the_lock_free(build, recwarn):
    stack = build()

    def refuse(*_):
        raise ValueError("from a hook")

    handle = stack.model[0].register_forward_pre_hook(refuse, prepend=True)
    with pytest.raises(ValueError, match="from a hook"):
        stack.model(random(3, SIZE))
    handle.remove()
    assert not recwarn.list  # torch turns an exception in a hook of ours into a warning
    assert torch.is_tensor(in_another_thread(lambda: stack.model(random(3, SIZE))))


@pytest.mark.parametrize("mode", ["direct", "buffered"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_file_truncated_under_the_model_is_an_error_in_every_forward(build, folder, is_first, mode):
    stack, activations = build(layers=8, options=OffloadOptions(mode, read_ahead_nbytes=0)), random(3, SIZE)
    file = folder / "model.safetensors"
    expected, content, times = stack.model(activations), file.read_bytes(), file.stat()
    stack.quiet()
    kept = 8 + int.from_bytes(content[:8], "little") if is_first else len(content) - 8
    with file.open("r+b") as stream:
        stream.truncate(kept)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="changed while the model was using it") as caught:
            stack.model(activations)
        assert caught.value.file == str(file)
        assert stack.is_offloaded()
    assert isinstance(in_another_thread(lambda: stack.model(activations)), CheckpointError)
    with file.open("r+b") as stream:
        stream.write(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert torch.equal(in_another_thread(lambda: stack.model(activations)), expected)


def test_a_file_truncated_before_the_backward_is_an_error_there(build, folder):
    stack = build()
    loss = stack.model(random(3, SIZE).requires_grad_()).sum()
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(4096)
    with pytest.raises(CheckpointError, match="changed while the model was using it"):
        loss.backward()
