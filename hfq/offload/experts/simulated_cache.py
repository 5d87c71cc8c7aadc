"""Hits of a cache of experts, computed from requests."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from hfq.offload.experts.eviction import HALF_LIFE, DecayedCounts

__all__ = ["KeyOf", "Request", "hit_rate", "simulate"]

Request = Sequence[tuple[int, int]]
"""The experts of one call, as (number of the module, expert)."""

KeyOf = Callable[[tuple[int, int], int], Any]
"""Returns the value of an expert after its use in a call; the expert with the least value leaves."""


def hit_rate(requests: Sequence[Request], places: int) -> float:
    """Returns the share of experts that an `ExpertCache` holds when they are needed.

    The first half of the requests fills it, and does not count.

    Args:
        requests: All calls.
        places: Number of experts that the cache holds.
    """
    modules = len({expert[0] for wanted in requests for expert in wanted})
    return simulate(requests, places, DecayedCounts(HALF_LIFE, modules).note, len(requests) // 2)


def simulate(requests: Sequence[Request], places: int, key_of: KeyOf, start: int = 0) -> float:
    """Returns the share of experts that were in the cache when they were needed.

    An expert that is needed always gets a place, and no expert of the same call leaves for it.

    Args:
        requests: All calls.
        places: Number of experts that the cache holds.
        key_of: The policy.
        start: Number of the first call that counts.
    """
    kept: dict[tuple[int, int], Any] = {}
    heap: list[tuple[Any, tuple[int, int]]] = []
    hits = total = 0
    for position, wanted in enumerate(requests):
        missing = [expert for expert in wanted if expert not in kept]
        if position >= start:
            hits, total = hits + len(wanted) - len(missing), total + len(wanted)
        needed = set(wanted)
        for expert in missing:
            while len(kept) >= places and heap:
                value, oldest = heapq.heappop(heap)
                if kept.get(oldest) == value and oldest not in needed:
                    del kept[oldest]
            if len(kept) < places:
                kept[expert] = None
        for expert in wanted:
            if expert in kept:
                kept[expert] = key_of(expert, position)
                heapq.heappush(heap, (kept[expert], expert))
    return hits / total if total else 0.0
