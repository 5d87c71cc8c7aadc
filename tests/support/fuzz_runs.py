"""Runs of a fuzz program over seeds, and its tables."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

__all__ = ["print_outcomes", "run_seeds"]

PER_SEED = 10_000


def run_seeds(
    count: int, first: int, attempt: Callable[[Random], tuple[bytes, str | None]]
) -> tuple[Counter, str]:
    """Tries files, each 10,000 of which have one seed; prints the files with a disagreement.

    Args:
        count: Number of files.
        first: The first seed.
        attempt: Makes and compares one file; returns it and the disagreement, if any.

    Returns:
        The number of each kind of disagreement, and the seeds and seconds for a heading.
    """
    wrong, started, left = Counter(), time.monotonic(), count
    seeds = range(first, first + -(-count // PER_SEED))
    for seed in seeds:
        random = Random(seed)
        for _ in range(min(PER_SEED, left)):
            file, fault = attempt(random)
            if fault is not None:
                wrong[fault.partition(":")[0]] += 1
                print(f"seed {seed}: {fault}\n  {file!r}")
        left -= PER_SEED
    return wrong, f"seeds {seeds[0]} to {seeds[-1]}, {time.monotonic() - started:.0f} s"


def print_outcomes(unit: str, seen: Counter, wrong: Counter, kinds: Iterable[str], stricter: Counter) -> None:
    """Prints the tables of outcomes, and of the reasons for which hfq alone refuses.

    Args:
        unit: What was tried, such as "files".
        seen: Number of each outcome without a disagreement.
        wrong: Number of each kind of disagreement.
        kinds: Kinds of disagreement that have a row in any case.
        stricter: Number of each reason.
    """
    print(f"| outcome | {unit} |\n|---|---|")
    for outcome, count in [*seen.items(), *((kind, wrong[kind]) for kind in sorted({*kinds, *wrong}))]:
        print(f"| {outcome} | {count:,} |")
    print(f"\n| why hfq alone refuses | {unit} |\n|---|---|")
    for reason, count in stricter.most_common():
        print(f"| {reason} | {count:,} |")
