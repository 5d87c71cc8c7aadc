"""Section for a report of a loaded model: placement map, timeline, offloading, and speed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hfq.offload.chrome_trace import chrome_trace
from hfq.offload.spans import TRACKS, Span
from hfq.placement.plan import ModuleDevice
from hfq.plots.fields import Fields
from hfq.plots.placement_map import placement_picture
from hfq.plots.section import Section, as_size
from hfq.plots.timeline_plot import timeline_picture
from hfq.tables import Table, as_rate

__all__ = ["read_modules", "run_section"]


def run_section(fields: Fields) -> Section:
    """Returns the section of one report.

    Raises:
        SetupError: A field is missing or not valid.
    """
    model = fields.object("model")
    name = Path(model.text("path")).name or model.text("path")
    facts = {
        "model": f"{model.text('class')}, {model.text('formats') or 'unquantized'}",
        "dtype of activations": model.text("dtype"),
    }
    facts |= {"computes on": model.text("device"), "hfq": model.text("hfq")}
    pictures = [placement_picture(read_modules(fields))]
    spans, units = _timeline(fields)
    timeline = timeline_picture(spans, units)
    if timeline is None:
        facts["timeline"] = "not recorded. hfq.report(model, measure=True) records one token"
    else:
        pictures.append(timeline)
    tables = [_device_table(fields)]
    if fields.has("offload"):
        tables.append(_stream(fields.object("offload")))
    if fields.has("speed"):
        tables.append(_speed(fields.object("speed")))
    return Section(f"{name}: a loaded model", facts, pictures, tables, chrome_trace(spans) if spans else None)


def read_modules(fields: Fields) -> list[ModuleDevice]:
    """Returns the modules of a report or a plan, at least one.

    Raises:
        SetupError: There are none, or one is not valid.
    """
    found = []
    for module in fields.objects("modules"):
        nbytes, quantized = module.count("nbytes"), module.count("quantized_nbytes")
        if quantized > nbytes:
            raise module.wrong(f"at most the module's {nbytes:,} bytes", quantized, "quantized_nbytes")
        found.append(
            ModuleDevice(
                module.text("module"),
                module.text("device"),
                module.text("execution_device"),
                nbytes,
                quantized,
            )
        )
    if not found:
        raise fields.wrong("at least one module", [], "modules")
    return found


def _timeline(fields: Fields) -> tuple[list[Span], list[str]]:
    """Returns the spans and the units of the recorded timeline. Both are empty without one."""
    if not fields.has("timeline"):
        return [], []
    recorded = fields.object("timeline")
    return [_span(span) for span in recorded.objects("spans")], recorded.texts("units")


def _span(fields: Fields) -> Span:
    track = fields.text("track")
    start = fields.number("start")
    end = fields.number("end")
    if track not in TRACKS:
        raise fields.wrong(", ".join(TRACKS), track, "track")
    if end < start:
        raise fields.wrong(f"an end at or after {start}", end, "end")
    device = fields.text("device") if fields.has("device") else ""
    return Span(track, fields.text("name"), start, end, fields.count("nbytes"), device)


def _device_table(fields: Fields) -> Table:
    rows = [
        (device.text("device"), f"{device.count('nbytes'):,}", f"{device.count('onloaded_nbytes'):,}")
        for device in fields.objects("devices")
    ]
    note = "Bytes stored on each device, and the bytes of them that one forward pass onloads."
    return Table("Devices", note, ("device", "bytes", "onloaded per forward"), rows)


def _stream(offload: Fields) -> Table:
    rows = [
        ("reads", offload.text("mode")),
        ("offloaded units", f"{offload.count('units'):,}"),
        ("bytes per pass", f"{offload.count('pass_nbytes'):,}"),
        ("bytes of the offload buffer", f"{offload.count('buffer_nbytes'):,}"),
        ("passes", f"{offload.count('passes'):,}"),
        ("units that were not the predicted one", f"{offload.count('prefetch_misses'):,}"),
        ("read so far", as_size(offload.count("nbytes_read"))),
        (
            "rate while reading",
            as_rate(offload.number("read_bandwidth") if offload.has("read_bandwidth") else None),
        ),
        (
            "the disk's limit",
            as_rate(offload.number("disk_bandwidth") if offload.has("disk_bandwidth") else None),
        ),
        ("waited for units", f"{offload.number('stall_seconds'):.3f} s"),
    ]
    return _pairs("Offloading so far", "Totals from loading the model until the report.", rows)


def _speed(speed: Fields) -> Table:
    def both(what: str, form: str, unit: str) -> tuple[str, str, str]:
        values = [
            speed.number(f"{what}_{kind}") if speed.has(f"{what}_{kind}") else None
            for kind in ("predicted", "achieved")
        ]
        return (unit, *("-" if value is None else format(value, form) for value in values))  # type: ignore[return-value]

    rows = [both("load", ".4g", "load, s"), both("step", ".4g", "one token, s")]
    note = f"Limited by {speed.text('dominant')}; rates: {speed.text('source')}."
    return Table("Speed", note, ("what", "predicted", "achieved"), rows)


def _pairs(title: str, note: str, rows: Sequence[tuple[str, str]]) -> Table:
    return Table(title, note, ("what", "how much"), rows)
