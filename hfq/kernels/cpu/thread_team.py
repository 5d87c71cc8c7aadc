"""Parts of one product, each on a thread of its own, where plain torch multiplies.

torch divides each of its operations among its threads, and they wait for each other after it; a part of a weight is a dozen of
them, of tens of microseconds each. Here a thread takes a part through all of them. The threads are torch's own, see
`hfq.kernels.cpp.openmp_team`; an operation within it has one.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch.utils import _python_dispatch

from hfq.formats.codecs.thread_buffers import borrow_buffers, lend_buffers
from hfq.kernels.cpp.openmp_team import team

__all__ = ["LEAST_NUMEL", "divide", "flushes_subnormals", "for_each", "members"]

T = TypeVar("T")

LEAST_NUMEL = 1 << 21
"""The fewest codes of a weight that is shared out: to wake a thread takes as long as a million codes do."""

_LEAST_ROWS = 32

_MEMBER = ctypes.CFUNCTYPE(None)  # called with a pointer, which it does not take
_GOMP_PARALLEL = ctypes.CFUNCTYPE(None, _MEMBER, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)

_LEAST = 2.0**-1074  # no constant expression: the processor is to multiply it


def flushes_subnormals() -> bool:
    """Whether this thread takes subnormal numbers for zeros (`torch.set_flush_denormal`)."""
    return _LEAST * 2 == 0


def members(out_features: int, in_features: int) -> int:
    """How many threads may share a weight; one where that is a matter of the thread: what watches operations (`TorchDispatchMode`),
    or what subnormal numbers are; and where half of torch's threads would have nothing to do.
    """
    if out_features * in_features < LEAST_NUMEL or team() is None:
        return 1
    threads, most = torch.get_num_threads(), out_features // _LEAST_ROWS
    if most * 2 <= threads or flushes_subnormals() or _python_dispatch._len_torch_dispatch_stack():
        return 1
    return min(threads, most)


def divide(count: int, most: int, multiples: Sequence[int], threads: int) -> list[range]:
    """Parts for `for_each`, of even length and as many for each thread, as nearly as multiples allow.

    Args:
        count: What is divided.
        most: The most of it in a part, unless the last of the multiples is more.
        multiples: Of what parts but the last are multiples: the first of these that is not too coarse for it.
        threads: Who shares it.
    """
    fine = [m for m in multiples if m <= most and (count % (m * threads) == 0 or count >= 4 * m * threads)]
    multiple = (fine or multiples[-1:])[0]
    blocks, most_blocks = -(-count // multiple), max(most // multiple, 1)
    parts = min(-(-blocks // (most_blocks * threads)) * threads, blocks)
    edges = [min(blocks * part // parts * multiple, count) for part in range(parts + 1)] if parts else []
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def for_each(work: Callable[[T], object], parts: Sequence[T], threads: int) -> None:
    """Calls `work` with each of the parts, in any order and at once.

    Each call is in the caller's modes of gradients and inference, and has buffers of its own (`thread_buffer`), which the caller's
    thread keeps. The first exception of a call, or of a signal's handler, is raised here, when the calls that had begun are over;
    others do not begin.
    """
    threads, address = min(threads, len(parts)), team()
    if threads < 2 or address is None:
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

    def member() -> Iterator[None]:
        """Goes on where it is within `try`: a signal's handler runs before a function's first line, where ctypes would ignore it."""
        try:
            yield
            if threading.get_ident() == caller:
                take()
            else:
                with borrow_buffers(lent), torch.inference_mode(inference), torch.set_grad_enabled(grad):
                    take()
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            left.clear()
            raised.append(error)

    each = [member() for _ in range(threads)]
    for one in each:
        next(one)
    begin = map(next, each, itertools.repeat(None)).__next__  # no Python around it
    _GOMP_PARALLEL(address)(_MEMBER(begin), None, threads, 0)
    if raised:
        raise raised[0]
    if len(finished) < len(parts):
        raise KeyboardInterrupt  # one more came while the first was noted
