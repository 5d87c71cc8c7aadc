"""Hits of an expert cache under several policies, computed from recorded routing."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hfq.offload.experts.eviction import DecayedCounts

__all__ = ["HALF_LIVES", "POLICIES", "Request", "hit_rates", "simulate"]

Request = Sequence[tuple[int, int]]
"""The experts of one call, as (number of the module, expert)."""

KeyOf = Callable[[tuple[int, int], int], Any]
"""Returns the value of an expert after its use in a call; the expert with the least value leaves."""

HALF_LIVES = (4, 16, 64, 256)


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


def _lru(requests: Sequence[Request], places: int, start: int) -> KeyOf:
    return lambda expert, position: position


def _decayed(passes: float) -> Callable[[Sequence[Request], int, int], KeyOf]:
    def policy(requests: Sequence[Request], places: int, start: int) -> KeyOf:
        modules = len({expert[0] for wanted in requests for expert in wanted})
        return DecayedCounts(passes, modules).note

    return policy


def _pins(requests: Sequence[Request], places: int, start: int) -> KeyOf:
    """Pins the experts that were used most before `start`; one call's experts have places besides."""
    counts = Counter(expert for wanted in requests[:start] for expert in wanted)
    free = max(len(wanted) for wanted in requests)
    pinned = {expert for expert, _ in counts.most_common(max(0, places - free))}
    return lambda expert, position: math.inf if expert in pinned else position


def _belady(requests: Sequence[Request], places: int, start: int) -> KeyOf:
    """Evicts what is needed last, which takes knowledge of the future: a bound for all policies."""
    following: dict[tuple[int, int], list[int]] = {}
    for position in range(len(requests) - 1, -1, -1):
        for expert in requests[position]:
            following.setdefault(expert, [len(requests)]).append(position)

    def key_of(expert: tuple[int, int], position: int) -> float:
        positions = following[expert]
        while positions[-1] <= position:
            positions.pop()
        return -positions[-1]

    return key_of


POLICIES: dict[str, Callable[[Sequence[Request], int, int], KeyOf]] = {
    "LRU": _lru,
    **{f"LFU, half-life {passes}": _decayed(passes) for passes in HALF_LIVES},
    "LFU, no decay": _decayed(1e9),
    "pins": _pins,
    "Belady": _belady,
}
"""Policies by name; each returns its `KeyOf` for requests, a number of places, and the first that counts."""


def hit_rates(requests: Sequence[Request], places: int) -> dict[str, float]:
    """Returns the hit rate of each policy over the second half of the calls."""
    start = len(requests) // 2
    return {
        name: simulate(requests, places, policy(requests, places, start), start)
        for name, policy in POLICIES.items()
    }
