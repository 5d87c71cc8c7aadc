"""Tables of `python -m benchmarks quality`, each followed by the published one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.quality import published
from benchmarks.quality.methods import ACT_ORDER, INT8, NUMBER_FORMATS, WEIGHTS_ALONE
from benchmarks.quality.published import Published
from benchmarks.records import Record
from hfq.plots.charts import Chart
from hfq.tables import Table

__all__ = ["chart", "find", "tables"]

Column = tuple[str, str]
"""A model and its outliers."""

_GPTQ_ROWS = [(method, bits) for bits in (8, 4, 3, 2) for method in ("RTN", "GPTQ", ACT_ORDER)]
_RATIO = "Perplexity over the float model's"
_BOTH = f"{_RATIO}, and in brackets the mean KL divergence of the next token from it, in nats."

_GRID = """A scale and a zero point for each row. GPTQ has its paper's damping and no search for ranges; by activation: channels are
quantized by decreasing activation (act-order)."""


def find(records: Iterable[Record], column: Column, method: str, bits: float | None = None) -> Record | None:
    """Returns the record of a method, with any number of bits if `bits` is None. None if not measured."""
    where = {"model": column[0], "outliers": column[1], "method": method} | (
        {} if bits is None else {"bits": bits}
    )
    return next((r for r in records if all(r[key] == value for key, value in where.items())), None)


def tables(records: Sequence[Record]) -> list[Table]:
    """Returns all tables, without columns and rows that were not measured."""
    codes: list[tuple[str, float | None]] = [
        (name, bits) for bits in (4, 3, 2) for name in ("k-means, by row", "RTN")
    ]
    return [
        _int8(records),
        _as_printed(published.LLM_INT8),
        _table(records, "Rounding and GPTQ", f"{_BOTH} {_GRID}", _GPTQ_ROWS),
        *map(
            _as_printed,
            (published.GPTQ_OPT, published.GPTQ_ACT_ORDER, published.GPTQ_BLOOM, published.GPTQ_LLAMA),
        ),
        _table(
            records,
            "Weights alone, symmetric and not",
            f"{_BOTH} By row where no groups are told.",
            _any_bits(WEIGHTS_ALONE),
        ),
        _as_printed(published.WEIGHTS_ALONE),
        _glm(records),
        _as_printed(published.GLM),
        _table(
            _without_outliers(records),
            "Number formats and tables",
            f"{_BOTH} Weights alone; RTN is that of the table above.",
            _any_bits(NUMBER_FORMATS) + codes,
        ),
        Table(
            "Errata",
            "What the material prints, and what its own arithmetic gives.",
            ("printed", "found", "see"),
            published.ERRATA,
        ),
    ]


def chart(records: Sequence[Record]) -> Chart:
    """Returns a chart of the perplexities of rounding and GPTQ, with and without outliers."""
    columns = _columns(records, ["RTN"])
    series = {
        f"{method} {bits}": [_value(find(records, column, method, bits)) for column in columns]
        for bits in (4, 3, 2)
        for method in ("RTN", "GPTQ")
    }
    kept = {name: values for name, values in series.items() if any(value is not None for value in values)}
    return Chart(f"{_RATIO} (lower is better)", [_named(column) for column in columns], kept, scale="log")


def _int8(records: Sequence[Record]) -> Table:
    columns = _columns(records, INT8)
    rows = [
        (f"{name}", *(_cell(find(records, column, name), with_kl=False) for column in columns))
        for name in INT8
        if any(find(records, column, name) for column in columns)
    ]
    shares = [find(records, column, "absmax LLM.int8()") for column in columns]
    rows.append(
        (
            "features in floats, mean over layers",
            *("-" if r is None else f"{r['outlier_share']:.2%}" for r in shares),
        )
    )
    rows.append(
        (
            "perplexity of the floats",
            *(_cell_of(find(records, column, "float"), "perplexity") for column in columns),
        )
    )
    note = f"""{_RATIO}, weights and activations in int8. Outliers: what four of the channels that linear layers read from a norm are
multiplied by, and what is added to them. Decomposition and LLM.int8() take features out from 1.05 times the largest activation on
that the model has without outliers."""
    return Table("int8 weights and activations", note, ("method", *map(_named, columns)), rows)


def _table(
    records: Sequence[Record], title: str, note: str, methods: Sequence[tuple[str, float | None]]
) -> Table:
    columns = _columns(records, [name for name, _ in methods])
    rows = []
    for name, bits in methods:
        found = [find(records, column, name, bits) for column in columns]
        if any(found):
            rows.append((name if bits is None else f"{name}, {bits:g} bits", *map(_cell, found)))
    return Table(title, note, ("method", *map(_named, columns)), rows)


def _glm(records: Sequence[Record]) -> Table:
    names = {"INT8": "W8sym-A16", "INT4": "W4sym-A16"}
    columns = [column for column in _columns(records, names.values()) if column[1] == "none"]
    rows = [
        (name, *(_cell(find(records, column, method)) for column in columns))
        for name, method in names.items()
    ]
    return Table(
        "GLM-130B's recipe: absmax by row", _BOTH, ("weights", *map(_named, columns)), rows if columns else []
    )


def _as_printed(table: Published) -> Table:
    rows = [(name, *(f"{value:g}" for value in values)) for name, values in table.rows.items()]
    return Table(f"Published: {table.title}", "As printed.", ("method", *table.models), rows)


def _columns(records: Sequence[Record], methods: Iterable[str]) -> list[Column]:
    wanted = set(methods)
    return list(dict.fromkeys((r["model"], r["outliers"]) for r in records if r["method"] in wanted))


def _without_outliers(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["outliers"] == "none"]


def _any_bits(methods: Iterable[str]) -> list[tuple[str, float | None]]:
    return [(method, None) for method in methods]


def _named(column: Column) -> str:
    return column[0] if column[1] == "none" else f"{column[0]}, outliers {column[1]}"


def _cell(record: Record | None, with_kl: bool = True) -> str:
    if record is None:
        return "-"
    return f"{record['ratio']:.3f}" + (f" ({record['kl']:.1e})" if with_kl else "")


def _cell_of(record: Record | None, key: str) -> str:
    return "-" if record is None else f"{record[key]:.2f}"


def _value(record: Record | None) -> float | None:
    return None if record is None else record["ratio"]
