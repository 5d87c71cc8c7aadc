"""Tables and targets of `python -m benchmarks real_sizes`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.real_sizes.cases import CASES, HFQ, Case
from benchmarks.records import Record, median, select
from hfq.plots.charts import Chart
from hfq.tables import Report, Table, Target

__all__ = ["real_sizes_report"]

PUBLISHED = (
    (
        "colibri",
        "GLM-5.2, 744B, int4",
        "25 GB of RAM, disk of 1 GB/s",
        "0.05 to 0.1",
        "github.com/JustVugg/colibri",
    ),
    (
        "colibri",
        "GLM-5.2, 744B, int4",
        "121 GB of RAM, NVMe of PCIe 5",
        "1.23",
        "github.com/JustVugg/colibri",
    ),
    ("colibri", "DeepSeek-V4-Flash", "Ryzen 5950X, CPU alone", "1.24", "colibri issue 1119"),
    ("ds4", "DeepSeek-V4-Flash", "M4 Max, 36 GB", "4.29 to 4.62", "github.com/antirez/ds4, issue 840"),
    ("FreeToken 0.2", "Qwen3.6-35B-A3B, NVFP4", "RTX 2050, 4 GB", "21", "FlashML-org/FreeToken, issue 239"),
    (
        "KTransformers",
        "DeepSeek-V3, 671B, Q4_K_M",
        "14 GB of VRAM, 382 GB of RAM",
        "8.7 to 13.7",
        "kvcache-ai/ktransformers",
    ),
)
"""What other projects publish: (project, model, hardware, decoded tokens per second, source)."""


_NOTE = """Own memory is anonymous memory after the load. Predicted is what `hfq.report` predicts before the
first token, with rates that were measured in the same run; it takes routing for even. Recorded is the prediction
from the recorded routing of 128 other tokens, which ran before those that were timed. Disk is what the process read
from devices per decoded token. Hits are routed experts that the cache had, or that a guess had begun to
read. A raw pass is the time of the bytes that a token needs from disk, at the rate of direct reads of the same
files in the same round. With the head rounded to FP8 when it is loaded, and attention that sums in another order
(hfq_sdpa), results are not those of the checkpoint; such rows count for no target. The last column is the ratio of
the decoding speeds."""

_OTHER_NOTE = """Columns are those above. Models have the named number of layers, and the speeds are those of
these layers: they say nothing about the whole model, since a token also takes the head. FP8 blocks are 128 x 128,
MXFP4 has groups of 32, NVFP4 of 16, NF4 of 64, AWQ and GPTQ of 128, int8 a scale for each row (pack-quantized is
what the recipe `w8a16` writes). The head and the embeddings are 16-bit. The MXFP4 of gpt-oss holds its experts only.
The first layer of DeepSeek-V3 is dense (in the published model, three of 61 are)."""

_COLUMNS: Mapping[str, tuple[str, Callable[[Record], float]]] = {
    "load": ("{:.1f} s", lambda record: record["load_seconds"]),
    "own memory": ("{:.2f} GB", lambda record: record["anonymous"] / 1e9),
    "prefill 128": ("{:.1f}/s", lambda record: record["prefill_128"]),
    "prefill 512": ("{:.1f}/s", lambda record: record["prefill_512"]),
    "decode": ("{:.2f}/s", lambda record: _speed(record)),
    "predicted": ("{:.2f}/s", lambda record: 1 / record["predicted_seconds"]),
    "recorded": ("{:.2f}/s", lambda record: 1 / record["predicted_recorded_seconds"]),
    "CPU time per token": ("{:.2f} s", lambda record: record["decode_cpu_seconds"]),
    "disk per token": ("{:.3f} GB", lambda record: record["decode_device_read"] / 1e9),
    "hits": ("{:.0%}", lambda record: record["decode_hit_rate"]),
    "raw pass": ("{:.2f} s", lambda record: _raw_pass(record)),
}
"""{column: (format, value of a record)}."""


def real_sizes_report(facts: Mapping[str, str], records: Sequence[Record]) -> Report:
    """Returns the report of all records, whose cases are in the order of `CASES`.

    Args:
        facts: Facts about the run.
        records: One for each measured contender of a case in a round.
    """
    cases = [case for case in CASES if select(records, case=case.name)]
    compared, others = [each for each in cases if not each.formats], [each for each in cases if each.formats]
    targets = [target for case in compared for target in _targets(case, records)]
    tables = [_table(compared, records), *([_other_formats(others, records)] if others else []), _published()]
    chart = _chart(compared, records)
    return Report("Whole models of real sizes", facts, tables, targets, records, chart, _TARGETS_NOTE)


_TARGETS_NOTE = "Medians over the rounds, of the better of hfq's two rows; of predictions, the worse."


def _speed(record: Record) -> float:
    return 1 / record["decode_seconds"]


def _raw_pass(record: Record) -> float:
    return record["decode_needed"] / record["raw_rate"]


def _of(
    records: Sequence[Record], case: Case, contender: str, value: Callable[[Record], float]
) -> float | None:
    return median(records, value, case=case.name, contender=contender)


def _table(cases: Sequence[Case], records: Sequence[Record]) -> Table:
    rows = []
    for case, contender, about in _measured(cases, records):
        cells = *_cells(case, contender, records), _ratio_cell(case, contender, records)
        rows.append([case.name, contender + about, *cells])
    return Table("Speed", _NOTE, ("model", "contender", *_COLUMNS, "of llama.cpp"), rows)


def _other_formats(cases: Sequence[Case], records: Sequence[Record]) -> Table:
    rows = [
        [case.name, contender + about, *_cells(case, contender, records)]
        for case, contender, about in _measured(cases, records)
    ]
    return Table("Other formats", _OTHER_NOTE, ("model", "contender", *_COLUMNS), rows)


def _measured(cases: Sequence[Case], records: Sequence[Record]) -> Iterator[tuple[Case, str, str]]:
    """Yields each case, a contender that was measured, and what a table says about its model."""
    for case in cases:
        for contender in case.contenders:
            if found := select(records, case=case.name, contender=contender.name):
                yield case, contender.name, f" ({found[0]['about']})" if "about" in found[0] else ""


def _cells(case: Case, contender: str, records: Sequence[Record]) -> Iterator[str]:
    for text, value in _COLUMNS.values():
        found = _of(records, case, contender, value)
        yield "-" if found is None else text.format(found)


def _ratio_cell(case: Case, contender: str, records: Sequence[Record]) -> str:
    is_whole = not any("about" in each for each in select(records, case=case.name, contender=contender))
    ratio = _ratio(case, contender, records, _speed) if is_whole else None
    return "-" if ratio is None else f"{ratio:.2f}"


def _published() -> Table:
    return Table(
        "What others publish",
        "Decoded tokens per second on their own machines, as their projects state them. Nothing of this was "
        "measured here.",
        ("project", "model", "hardware", "tokens/s", "source"),
        PUBLISHED,
    )


def _ratio(
    case: Case, contender: str, records: Sequence[Record], value: Callable[[Record], float]
) -> float | None:
    """Returns a value of a contender, divided by llama.cpp's."""
    bar, found = (_of(records, case, name, value) for name in (case.contenders[-1].name, contender))
    return None if bar is None or found is None else found / bar


def _targets(case: Case, records: Sequence[Record]) -> Iterator[Target]:
    def over_hfq(value: Callable[[str], float | None], best: Callable[..., float] = max) -> float | None:
        return best((found for each in HFQ if (found := value(each.name)) is not None), default=None)

    def against(value: Callable[[Record], float]) -> float | None:
        return over_hfq(lambda name: _ratio(case, name, records, value))

    def of_hfq(value: Callable[[Record], float], best: Callable[..., float] = min) -> float | None:
        return over_hfq(lambda name: _of(records, case, name, value), best)

    what = case.name
    yield Target(f"{what}: decoding against llama.cpp", against(_speed), case.least, True)
    if case.limit is None:
        prefill = against(lambda record: record["prefill_512"])
        yield Target(f"{what}: prompt of 512 tokens against llama.cpp", prefill, 1.0, True)
    if case.most_load is not None:
        seconds = of_hfq(lambda record: record["load_seconds"])
        yield Target(f"{what}: seconds of a load from the page cache", seconds, case.most_load)
    resident = next((each for each in CASES if each.shape == case.shape and each.limit is None), None)
    if case.limit is not None and resident is not None:
        used = over_hfq(lambda name: _of_resident(case, resident, name, records), min)
        yield Target(f"{what}: CPU time of a token against the resident model's", used, 1.2)
    if case.limit is not None:
        read = of_hfq(lambda record: record["decode_device_read"] / record["decode_needed"])
        yield Target(f"{what}: bytes read per token against those missed", read, 1.05)
    if case.reads_all_layers:
        share = of_hfq(lambda record: _raw_pass(record) / record["decode_seconds"], max)
        yield Target(f"{what}: decoding against one raw O_DIRECT pass", share, 0.9, True)
    off = of_hfq(lambda record: abs(record["decode_seconds"] / record["predicted_seconds"] - 1), max)
    yield Target(f"{what}: predicted tokens/s, off by this share of the measured", off, 0.3)
    if case.is_skewed:
        off = of_hfq(
            lambda record: abs(record["decode_seconds"] / record["predicted_recorded_seconds"] - 1), max
        )
        yield Target(f"{what}: predicted from recorded routing, off by this share of the measured", off, 0.3)


def _of_resident(case: Case, resident: Case, name: str, records: Sequence[Record]) -> float | None:
    """Returns the CPU seconds of a token, divided by those of the resident model."""
    used, bar = (
        _of(records, each, name, lambda record: record["decode_cpu_seconds"]) for each in (case, resident)
    )
    return None if used is None or not bar else used / bar


def _chart(cases: Sequence[Case], records: Sequence[Record]) -> Chart:
    """Returns the decoding speeds of hfq's two formats over that of the last contender."""
    groups = [case.name for case in cases]
    values = {each.name: [_ratio(case, each.name, records, _speed) for case in cases] for each in HFQ}
    title = "Decoding speed over that of llama.cpp (higher is better)"
    return Chart(title, groups, values, scale="log")
