"""Orderings that the tables must have, each with its least margin.

Divergences compare methods that lose little. Their perplexities differ by less than the noise of a small
model. Divergences are ratios of two methods' distances from the float model. Perplexities show which methods
break and which do not.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from benchmarks.quality.methods import ACT_ORDER, INT8, NUMBER_FORMATS
from benchmarks.quality.quality_tables import Column, find
from benchmarks.records import Record
from hfq.tables import Target

__all__ = ["LOSSLESS", "orderings", "quick_orderings"]

LOSSLESS = 0.003
"""Largest relative difference of perplexities that count as equal."""

OPT, LLAMA = ("OPT", "none"), ("Llama", "none")
SHIFTED, GAINED = ("OPT", "+60"), ("Llama", "×200")
STRONG = ("OPT", "×100 +297")
_STRENGTHS = (OPT, ("OPT", "×4 +9"), ("OPT", "×16 +45"), STRONG)

Point = tuple[str, float | None]
"""A method and its bits."""


class _Found:
    """Targets about records. A missing measurement is an unmet target."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records

    def farther(self, column: Column, worse: Point, better: Point, margin: float) -> Target:
        """Requires the ratio of two methods' divergences to be at least `margin`."""
        what = f"{_named(column)}: divergence of {_point(worse)} over that of {_point(better)}"
        return Target(what, self._farther(column, worse, better), margin, at_least=True)

    def farther_in_all(self, columns: Sequence[Column], worse: Point, better: Point, margin: float) -> Target:
        """Requires the same as `farther` for the geometric mean over models.

        It is for methods so similar that retraining one model may reverse their order.
        """
        ratios = [self._farther(column, worse, better) for column in columns]
        mean = None if None in ratios else statistics.geometric_mean(ratios)  # type: ignore[arg-type]
        named = " and ".join(map(_named, columns))
        return Target(
            f"{named}: divergence of {_point(worse)} over that of {_point(better)}",
            mean,
            margin,
            at_least=True,
        )

    def _farther(self, column: Column, worse: Point, better: Point) -> float | None:
        values = [self._value(column, point, "kl") for point in (worse, better)]
        return None if None in values else values[0] / max(values[1], 1e-12)  # type: ignore[operator,type-var]

    def grows(self, method: str, weaker: Column, stronger: Column, margin: float) -> Target:
        """Requires a method's divergence to grow with stronger outliers by at least `margin`."""
        values = [self._value(column, (method, None), "kl") for column in (stronger, weaker)]
        ratio = None if None in values else values[0] / max(values[1], 1e-12)  # type: ignore[operator,type-var]
        return Target(
            f"{method}: divergence of {_named(stronger)} over that of {_named(weaker)}",
            ratio,
            margin,
            at_least=True,
        )

    def breaks(self, column: Column, point: Point, bound: float) -> Target:
        """Requires a perplexity relative to the float model of at least `bound`."""
        return Target(
            f"{_named(column)}: perplexity of {_point(point)}",
            self._value(column, point, "ratio"),
            bound,
            True,
        )

    def holds(self, column: Column, point: Point, bound: float) -> Target:
        """Requires a perplexity relative to the float model of at most `bound`."""
        return Target(
            f"{_named(column)}: perplexity of {_point(point)}", self._value(column, point, "ratio"), bound
        )

    def _value(self, column: Column, point: Point, key: str) -> float | None:
        record = find(self.records, column, *point)
        return None if record is None else record[key]


def orderings(records: Sequence[Record]) -> list[Target]:
    """Returns the orderings of all tables."""
    found = _Found(records)
    return [
        *_injected(records),
        *_int8(found),
        *_gptq(found),
        *_blow_up(found),
        *_weights_alone(found),
        *_formats(found),
    ]


def quick_orderings(records: Sequence[Record]) -> list[Target]:
    """Returns the orderings of the rows that `--quick` measures, on a smaller model."""
    found = _Found(records)
    absmax, by_row, zero, whole = ((name, None) for name in _QUICK_INT8)
    return [
        *_injected(records),
        found.holds(OPT, ("RTN", 8), 1 + LOSSLESS),
        found.farther(OPT, ("RTN", 3), ("RTN", 8), 10),
        found.farther(SHIFTED, ("RTN", 3), ("GPTQ", 3), 1.2),
        found.farther(SHIFTED, ("GPTQ", 3), (ACT_ORDER, 3), 1.2),
        found.farther(SHIFTED, ("RTN", 4), (ACT_ORDER, 3), 1.3),
        found.breaks(STRONG, absmax, 1.05),
        found.farther(STRONG, absmax, by_row, 1.5),
        found.farther(STRONG, by_row, zero, 1.5),
        found.farther(STRONG, zero, whole, 2),
        found.holds(STRONG, whole, 1 + LOSSLESS),
    ]


_QUICK_INT8 = ("int8 absmax", "int8 absmax row-wise", "int8 zeropoint vector-wise", "absmax LLM.int8()")


def _injected(records: Sequence[Record]) -> list[Target]:
    """Requires that outliers change nothing while nothing is rounded."""
    floats = {(r["model"], r["outliers"]): r["perplexity"] for r in records if r["method"] == "float"}
    offsets = {
        column: abs(value / floats[column[0], "none"] - 1)
        for column, value in floats.items()
        if column[1] != "none"
    }
    return [
        Target(
            f"{_named(column)}: the float model's perplexity, off from that without outliers", offset, 1e-3
        )
        for column, offset in offsets.items()
    ]


def _int8(found: _Found) -> list[Target]:
    """Requires LLM.int8()'s order: with outliers, tensor scales break first, then row scales.

    Without outliers, all methods are equal. Decomposition holds.
    """
    targets = [found.holds(column, (name, None), 1 + LOSSLESS) for column in (OPT, LLAMA) for name in INT8]
    decomposed = [name for name in INT8 if "decomposition" in name or "LLM.int8()" in name]
    targets += [
        found.holds(column, (name, None), 1 + LOSSLESS) for column in (STRONG, GAINED) for name in decomposed
    ]
    targets += [
        found.grows(name, weaker, stronger, 2)
        for name in INT8
        if name not in decomposed
        for weaker, stronger in itertools.pairwise(_STRENGTHS)
    ]
    absmax, zero = ("int8 absmax", None), ("int8 zeropoint", None)
    by_row, by_vector = ("int8 absmax row-wise", None), ("int8 absmax vector-wise", None)
    zero_vector, whole = ("int8 zeropoint vector-wise", None), ("absmax LLM.int8()", None)
    return [
        *targets,
        found.breaks(STRONG, absmax, 2),
        found.farther(STRONG, absmax, by_row, 1.5),
        found.farther(STRONG, absmax, zero, 1.5),
        found.farther(STRONG, by_vector, zero_vector, 1.5),
        found.farther(STRONG, zero, zero_vector, 1.5),
        found.farther(STRONG, by_row, ("int8 absmax row-wise + decomposition", None), 5),
        found.farther(STRONG, zero_vector, ("zeropoint LLM.int8()", None), 5),
        found.breaks(GAINED, absmax, 2),
        found.farther(GAINED, absmax, by_row, 1.5),
        found.farther(GAINED, by_vector, whole, 5),
    ]


def _gptq(found: _Found) -> list[Target]:
    """Requires GPTQ to be better at all bits without outliers, but to gain less than one more bit."""
    targets = [
        found.farther(column, ("RTN", bits), ("GPTQ", bits), 1.5)
        for column in (OPT, LLAMA, SHIFTED)
        for bits in (4, 3, 2)
    ]
    targets += [
        found.farther(column, ("GPTQ", bits - 1), ("RTN", bits), 1.1)
        for column in (OPT, LLAMA)
        for bits in (4, 3)
    ]
    return targets


def _blow_up(found: _Found) -> list[Target]:
    """Requires rounding to 4 bits to break with outliers while GPTQ holds, as for OPT-66B.

    Ordering by activation improves GPTQ further.
    """
    return [
        found.breaks(SHIFTED, ("RTN", 4), 1.4),
        found.holds(SHIFTED, ("GPTQ", 4), 1.1),
        found.breaks(SHIFTED, ("RTN", 3), 3),
        found.holds(SHIFTED, ("GPTQ", 3), 1.6),
        found.farther(SHIFTED, ("RTN", 4), ("GPTQ", 3), 1.2),
        *(found.farther(SHIFTED, ("GPTQ", bits), (ACT_ORDER, bits), 1.2) for bits in (4, 3, 2)),
    ]


def _weights_alone(found: _Found) -> list[Target]:
    """Requires no loss at 8 bits, and at 4 bits a gain from zero points and from groups.

    Both rows of GLM are among these.
    """
    eight = [("W8sym-A16", None), ("W8asym-A16", None)]
    targets = [found.holds(column, point, 1 + LOSSLESS) for column in (OPT, LLAMA) for point in eight]
    symmetric, asymmetric = ("W4sym-A16", None), ("W4asym-A16", None)
    for column in (OPT, LLAMA):
        targets += [
            found.farther(column, symmetric, asymmetric, 1.1),
            found.farther(column, symmetric, ("W4sym-A16, groups of 64", None), 1.1),
            found.farther(column, asymmetric, ("W4asym-A16, groups of 64", None), 1.1),
            found.farther(column, symmetric, ("W8sym-A16", None), 10),
            found.holds(column, symmetric, 1.05),
        ]
    return [*targets, found.breaks(SHIFTED, symmetric, 1.4), found.breaks(SHIFTED, asymmetric, 1.4)]


def _formats(found: _Found) -> list[Target]:
    """Requires no loss from FP8, E4M3 better than E5M2, and E3M0 worst of the 4-bit floats.

    A fitted table is better than even steps. The order of E2M1 and NF4 varies between trainings of the OPT,
    so it is required only for the mean of both models.
    """
    by_row, by_tensor, wide, e2m1, _, e3m0, nf4 = ((name, None) for name in NUMBER_FORMATS)
    targets = []
    for column in (OPT, LLAMA):
        targets += [
            found.holds(column, by_row, 1 + LOSSLESS),
            found.holds(column, by_tensor, 1 + LOSSLESS),
            found.farther(column, wide, by_row, 2),
            found.farther(column, e2m1, by_row, 2),
            found.farther(column, e3m0, e2m1, 1.2),
            *(found.farther(column, ("RTN", bits), ("k-means, by row", bits), 1.05) for bits in (4, 3, 2)),
        ]
    return [*targets, found.farther_in_all((OPT, LLAMA), e2m1, nf4, 1.05)]


def _named(column: Column) -> str:
    return column[0] if column[1] == "none" else f"{column[0]} with outliers {column[1]}"


def _point(point: Point) -> str:
    return point[0] if point[1] is None else f"{point[0]} {point[1]:g}"
