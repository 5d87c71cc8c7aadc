"""Published results that small models do not show. No ordering of them is asserted."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.quality import published
from benchmarks.quality.published import Published
from benchmarks.quality.quality_tables import Column, find
from benchmarks.records import Record
from hfq.tables import Table

__all__ = ["differences"]

_OPT = ("OPT", "none")
_LLAMA = ("Llama", "none")
_SHIFTED = ("OPT", "+60")
_GAINED = ("Llama", "×200")
_STRONG = ("OPT", "×100 +297")
_NO_OUTLIERS = "small models have no outlier features of their own, and lose little without them"
_ABSMAX, _DECOMPOSED = "int8 absmax", "int8 absmax row-wise + decomposition"


def differences(records: Sequence[Record]) -> Table:
    """Returns ratios of perplexities, published and measured, without rows that miss a measurement."""
    int8, opt, weights = published.LLM_INT8, published.GPTQ_OPT, published.WEIGHTS_ALONE
    rows = [
        (_ABSMAX, _over(int8, _ABSMAX, "fp32", "125M"), _ratio(records, _OPT, _ABSMAX), _NO_OUTLIERS),
        ("RTN 4", _over(opt, "RTN 4", "full 16", "125M"), _ratio(records, _OPT, "RTN", 4), _NO_OUTLIERS),
        ("RTN 3", _over(opt, "RTN 3", "full 16", "125M"), _ratio(records, _OPT, "RTN", 3), _NO_OUTLIERS),
        (
            "RTN 3",
            _over(published.GPTQ_LLAMA, "RTN 3", "full 16", "7B"),
            _ratio(records, _LLAMA, "RTN", 3),
            _NO_OUTLIERS,
        ),
        (
            "RTN 4 with outliers",
            _over(opt, "RTN 4", "full 16", "66B"),
            _ratio(records, _GAINED, "RTN", 4),
            "a Llama's norms have no bias that could shift, and a gain alone leaves the errors of its "
            "columns as small as they are",
        ),
        (
            "W4sym over W4asym, with outliers",
            _over(weights, "W4sym-A16", "W4asym-A16", "66b"),
            _quotient(records, _SHIFTED, "W4sym-A16", "W4asym-A16"),
            "zero points help without outliers; why not here is not known",
        ),
        (
            "decomposition by row over LLM.int8()",
            _over(int8, _DECOMPOSED, "absmax LLM.int8()", "125M"),
            _quotient(records, _STRONG, _DECOMPOSED, "absmax LLM.int8()"),
            "scales for all of a small weight lose nothing",
        ),
        (
            "INT4 of GLM's recipe",
            _over(published.GLM, "INT4", "FP16", "130B"),
            _ratio(records, _LLAMA, "W4sym-A16"),
            _NO_OUTLIERS,
        ),
    ]
    shown = [(what, theirs, f"{ours:.3f}", why) for what, theirs, ours, why in rows if ours is not None]
    note = (
        "Ratios of perplexities, over the float model's where nothing else is told. None of these is "
        "asserted."
    )
    return Table(
        "What does not come out as published", note, ("what", "published", "here", "presumably since"), shown
    )


def _over(table: Published, method: str, base: str, model: str) -> str:
    index = table.models.index(model)
    return f"{table.rows[method][index] / table.rows[base][index]:.3f} ({model})"


def _ratio(records: Sequence[Record], column: Column, method: str, bits: float | None = None) -> float | None:
    record = find(records, column, method, bits)
    return None if record is None else record["ratio"]


def _quotient(records: Sequence[Record], column: Column, method: str, base: str) -> float | None:
    above, below = (_ratio(records, column, name) for name in (method, base))
    return None if above is None or below is None else above / below
