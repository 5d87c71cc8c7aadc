"""Hits of an expert cache under several policies, computed from recorded routing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from hfq.offload.experts.eviction import DecayedCounts
from hfq.offload.experts.simulated_cache import KeyOf, Request, simulate

__all__ = ["HALF_LIVES", "POLICIES", "hit_rates"]

HALF_LIVES = (4, 16, 64, 256)


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
