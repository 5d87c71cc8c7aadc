"""Several threads use one offloaded model: one block at a time, and everyone's result is right."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from hfq.kernels import reference
from hfq.kernels.registry import Kernel

SIZE = 64


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_two_threads_get_what_each_would_get_alone(build):
    stack, resident = build(), build(offload=False)
    batches = [random(3 + i, SIZE, seed=i) for i in range(2)]
    expected = [resident.model(batch) for batch in batches]
    barrier = threading.Barrier(2, timeout=20)

    def work(index: int) -> list[bool]:
        barrier.wait()
        return [torch.equal(stack.model(batches[index]), expected[index]) for _ in range(25)]

    with ThreadPoolExecutor(2) as pool:
        outcomes = [future.result(60) for future in [pool.submit(work, index) for index in range(2)]]
    assert outcomes == [[True] * 25] * 2
    assert stack.is_offloaded()


def test_a_second_thread_waits_while_a_block_is_in_use(build):
    stack, activations = build(), random(3, SIZE)
    expected = stack.model(activations)
    inside, leave = threading.Event(), threading.Event()

    def hold(layer):
        layer.probe = lambda layer: None
        inside.set()
        assert leave.wait(20)

    stack.model[0].probe = hold
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(stack.model, activations)
        assert inside.wait(20)
        before = stack.quiet()
        second = pool.submit(stack.model, activations)
        assert not second.done()
        assert not leave.wait(0.2)
        assert not second.done()
        assert stack.reader.counters.bytes_read == before
        leave.set()
        assert torch.equal(first.result(20), expected)
        assert torch.equal(second.result(20), expected)


def test_a_thread_that_fails_does_not_block_the_other(build):
    stack, activations = build(), random(3, SIZE)
    expected = stack.model(activations)

    def fail():
        try:
            stack.model(random(3, SIZE + 1))
        except Exception as error:
            return type(error).__name__
        return "nothing"

    def work() -> bool:
        return torch.equal(stack.model(activations), expected)

    with ThreadPoolExecutor(2) as pool:
        failures, results = [], []
        for _ in range(10):
            failures.append(pool.submit(fail))
            results.append(pool.submit(work))
        assert all(result.result(60) for result in results)
        assert "nothing" not in {failure.result(60) for failure in failures}
    assert stack.is_offloaded()


def test_a_backward_is_not_disturbed_by_the_forward_of_another_thread(build):
    stack, activations = build(), random(4, SIZE).requires_grad_()
    resident, alone = build(offload=False), random(4, SIZE).requires_grad_()
    resident.model(alone).sum().backward()
    loss = stack.model(activations).sum()
    inside, leave = threading.Event(), threading.Event()

    def hold(layer):
        inside.set()
        leave.wait(2)

    def late_grad(*arguments):
        leave.set()
        forward.result(20)
        return reference.linear_grad(*arguments)

    stack.model[0].probe = hold
    stack.model[0].q.kernel = Kernel("late", reference.linear, late_grad)
    with ThreadPoolExecutor(1) as pool:
        forward = pool.submit(stack.model, random(3, SIZE))
        assert inside.wait(20)
        loss.backward()
    assert torch.equal(activations.grad, alone.grad)
