"""Parts of one product, each on a thread of its own, where plain torch multiplies.

torch divides each of its operations among its threads, and they wait for each other after it; a part of a weight is a dozen of
them, of tens of microseconds each. Here a thread takes a part through all of them. The threads are torch's own, see
`hfq.kernels.native.team`; an operation within it has one.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.utils import _python_dispatch

from hfq.formats.buffers import borrow_buffers, lend_buffers
from hfq.kernels.native.team import team

__all__ = ["LEAST_NUMEL", "divide", "for_each", "members"]

T = TypeVar("T")

_MEMBER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_GOMP_PARALLEL = ctypes.CFUNCTYPE(None, _MEMBER, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


LEAST_NUMEL = 1 << 21
"""The fewest codes of a weight that is shared out: to wake a thread takes as long as a million codes do."""


def members(numel: int) -> int:
    """How many threads may share a weight of so many codes; one where operations are watched (`TorchDispatchMode`): by thread."""
    if numel < LEAST_NUMEL or team() is None or _python_dispatch._len_torch_dispatch_stack():
        return 1
    return torch.get_num_threads()


def divide(count: int, most: int, multiple: int, threads: int) -> list[range]:
    """Even parts, as many for each thread, of up to `most`: multiples of `multiple` but the last, and none less than one of it."""
    blocks, most_blocks = -(-count // multiple), max(most // multiple, 1)
    parts = min(-(-blocks // (most_blocks * threads)) * threads, blocks)
    edges = [min(blocks * part // parts * multiple, count) for part in range(parts + 1)] if parts else []
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def for_each(work: Callable[[T], object], parts: Sequence[T], threads: int) -> None:
    """Calls `work` with each of the parts: in any order and at once; one by one where they are fewer than threads.

    Each call is in the caller's modes of gradients and inference, and has buffers of its own (`thread_buffer`), which the caller's
    thread keeps. What a call raises is raised here, when those that had begun are over; others do not begin.
    """
    if not 1 < threads <= len(parts):
        for part in parts:
            work(part)
        return
    caller, lent = threading.get_ident(), lend_buffers()
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    left, finished, raised = deque(parts), [], []

    def take() -> None:
        while left:
            try:
                part = left.popleft()
            except IndexError:  # another was faster
                return
            work(part)
            finished.append(part)

    def member(_: object) -> None:
        try:
            if threading.get_ident() == caller:
                take()
            else:
                with borrow_buffers(lent), torch.inference_mode(inference), torch.set_grad_enabled(grad):
                    take()
        except BaseException as error:  # an interrupt, too: there is no Python above this to raise it in
            left.clear()
            raised.append(error)

    _GOMP_PARALLEL(team() or 0)(_MEMBER(member), None, threads, 0)
    if raised:
        raise raised[0]
    if len(finished) < len(parts):  # an interrupt came between this and the team, where ctypes prints it and goes on
        raise KeyboardInterrupt
