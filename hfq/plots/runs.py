"""What `hfq.report(model)` found of a loaded model: its placement map, its timeline, its streaming and its speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hfq.benchmarks.report import Table, as_rate
from hfq.offload.spans import LANES, Span
from hfq.placement.plan import ModuleHome
from hfq.plots.fields import Fields
from hfq.plots.placement_map import placement_picture
from hfq.plots.section import Section, as_size
from hfq.plots.timeline_plot import timeline_picture
from hfq.offload.chrome_trace import chrome_trace

__all__ = ["read_modules", "run_section"]


def run_section(fields: Fields) -> Section:
    """The section of one report.

    Raises:
        SetupError: A field is missing or is not what it should be.
    """
    model = fields.object("model")
    name = Path(model.text("path")).name or model.text("path")
    facts = {
        "model": f"{model.text('class')}, {model.text('dialects') or 'not packed'}",
        "dtype of activations": model.text("dtype"),
    }
    facts |= {"computes on": model.text("device"), "hfq": model.text("hfq")}
    pictures = [placement_picture(read_modules(fields))]
    spans, blocks = _timeline(fields)
    timeline = timeline_picture(spans, blocks)
    if timeline is None:
        facts["timeline"] = "not recorded; hfq.report(model, measure=True) records one token"
    else:
        pictures.append(timeline)
    tables = [_homes(fields)]
    if fields.has("stream"):
        tables.append(_stream(fields.object("stream")))
    if fields.has("speed"):
        tables.append(_speed(fields.object("speed")))
    return Section(f"{name}: a loaded model", facts, pictures, tables, chrome_trace(spans) if spans else None)


def read_modules(fields: Fields) -> list[ModuleHome]:
    """The modules of a report or a plan, one or more.

    Raises:
        SetupError: There are none, or one is not what it should be.
    """
    found = []
    for module in fields.objects("modules"):
        nbytes, packed = module.count("nbytes"), module.count("packed_nbytes")
        if packed > nbytes:
            raise module.wrong(f"at most the module's {nbytes:,} bytes", packed, "packed_nbytes")
        found.append(ModuleHome(module.text("module"), module.text("home"), module.text("device"), nbytes, packed))
    if not found:
        raise fields.wrong("one module or more", [], "modules")
    return found


def _timeline(fields: Fields) -> tuple[list[Span], list[str]]:
    """Returns the spans and the blocks of the recorded timeline; both are empty if there is none."""
    if not fields.has("timeline"):
        return [], []
    recorded = fields.object("timeline")
    return [_span(span) for span in recorded.objects("spans")], recorded.texts("blocks")


def _span(fields: Fields) -> Span:
    lane, start, end = fields.text("lane"), fields.number("start"), fields.number("end")
    if lane not in LANES:
        raise fields.wrong(", ".join(LANES), lane, "lane")
    if end < start:
        raise fields.wrong(f"an end at or after {start}", end, "end")
    return Span(lane, fields.text("name"), start, end, fields.count("nbytes"))


def _homes(fields: Fields) -> Table:
    rows = [
        (home.text("home"), f"{home.count('nbytes'):,}", f"{home.count('moved_nbytes'):,}") for home in fields.objects("homes")
    ]
    note = "Bytes that rest there, and those of them that a forward of all modules moves."
    return Table("Homes", note, ("home", "bytes", "moved a forward"), rows)


def _stream(stream: Fields) -> Table:
    rows = [
        ("reads", stream.text("mode")),
        ("streamed blocks", f"{stream.count('blocks'):,}"),
        ("bytes a pass", f"{stream.count('pass_nbytes'):,}"),
        ("bytes of the ring", f"{stream.count('ring_nbytes'):,}"),
        ("passes", f"{stream.count('passes'):,}"),
        ("blocks that were not the expected one", f"{stream.count('mispredicts'):,}"),
        ("read so far", as_size(stream.count("nbytes_read"))),
        ("rate while reading", as_rate(stream.number("rate") if stream.has("rate") else None)),
        ("the disk's limit", as_rate(stream.number("limit") if stream.has("limit") else None)),
        ("waited for blocks", f"{stream.number('waited_seconds'):.3f} s"),
    ]
    return _pairs("Streaming so far", "Counted since the model was loaded, until the report was asked for.", rows)


def _speed(speed: Fields) -> Table:
    def both(what: str, form: str, unit: str) -> tuple[str, str, str]:
        values = [
            speed.number(f"{what}_{kind}") if speed.has(f"{what}_{kind}") else None for kind in ("predicted", "achieved")
        ]
        return (unit, *("-" if value is None else format(value, form) for value in values))  # type: ignore[return-value]

    rows = [both("load", ".4g", "load, s"), both("step", ".4g", "one token, s")]
    note = f"Decided by {speed.text('dominant')}; rates: {speed.text('source')}."
    return Table("Speed", note, ("what", "predicted", "achieved"), rows)


def _pairs(title: str, note: str, rows: Sequence[tuple[str, str]]) -> Table:
    return Table(title, note, ("what", "how much"), rows)
