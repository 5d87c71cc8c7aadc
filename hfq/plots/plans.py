"""What `hfq plan --json` printed: homes against their limits, the placement map, ranks of ZeRO, a catalog, a
ladder of formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hfq.plots.bars import Bars, bars_picture
from hfq.plots.charts import Scatter
from hfq.plots.fields import Fields
from hfq.plots.placement_map import placement_picture
from hfq.plots.runs import read_modules
from hfq.plots.section import Picture, Section, as_size
from hfq.tables import Table

__all__ = ["PARTS", "plan_section"]

PARTS = {
    "weights_nbytes": "weights",
    "buffer_nbytes": "buffer",
    "experts_nbytes": "experts' cache",
    "kv_cache_nbytes": "KV cache",
    "activations_nbytes": "activations",
}
"""What a home holds, by the name in a report of `hfq plan`, as it is called in tables and pictures."""

_DEVICES = ("device", "cpu", "nvme")


def plan_section(fields: Fields) -> Section:
    """The section of one plan.

    Raises:
        SetupError: A field is missing or is not what it should be.
    """
    model, work = fields.object("model"), fields.object("workload")
    name = Path(model.text("path")).name or model.text("path")
    facts = {
        "model": f"{model.text('class')} of {model.count('layers')} layers, "
        f"{model.text('formats') or 'not packed'}",
        "files": f"{model.count('file_nbytes'):,} B",
        "workload": f"batch {work.count('batch')}, context {work.count('context')}, KV cache "
        f"{work.text('kv_dtype')}",
        "machine": _machine(fields.object("machine")),
    }
    pictures: list[Picture] = []
    tables: list[Table] = []
    if fields.has("devices"):
        pictures += [_homes(fields.object("devices")), placement_picture(read_modules(fields))]
    if fields.has("prediction"):
        tables.append(_prediction(fields.object("prediction")))
    if fields.has("zero3"):
        pictures.append(_zero3(fields.object("zero3")))
    if fields.has("catalog"):
        pictures.append(_catalog(fields.objects("catalog"), fields))
    if fields.has("ladder"):
        pictures.append(_ladder(fields.object("ladder")))
    if not pictures:
        raise fields.wrong("homes, zero3, catalog or ladder", sorted(fields.names()))
    return Section(f"{name}: a plan", facts, pictures, tables)


def _machine(machine: Fields) -> str:
    gpus = (
        ", ".join(as_size(machine.numbers_of("gpu_nbytes", size)) for size in machine.items("gpu_nbytes"))
        or "no accelerator"
    )
    return f"{gpus}, {as_size(machine.count('cpu_nbytes'))} of CPU memory"


def _homes(devices: Fields) -> Picture:
    names = devices.names()
    found = [devices.object(name) for name in names]
    parts = {title: [device.count(part) for device in found] for part, title in PARTS.items()}
    limits = [
        float(device.count("capacity_nbytes")) if device.has("capacity_nbytes") else None for device in found
    ]
    note = "Bytes in each home: weights at home, and what running takes beside them."
    return bars_picture("devices", "What each home holds", Bars(names, parts, limits), note, "home")


def _prediction(prediction: Fields) -> Table:
    rows = [("load from a cold disk", f"{prediction.number('load_seconds'):.4g} s")]
    if prediction.has("tokens_per_second"):
        rows.append(("tokens a second", f"{prediction.number('tokens_per_second'):.4g}"))
    if prediction.has("step_seconds"):
        rows.append(("a step", f"{prediction.number('step_seconds'):.4g} s"))
    for helped in prediction.items("helps") if prediction.has("helps") else ():
        if not isinstance(helped, list) or len(helped) != 2:
            raise prediction.wrong("pairs of text and tokens a second", helped, "helps")
        what, rate = helped
        rows.append(
            (
                f"with {prediction.text_of('helps', what)}",
                f"{prediction.numbers_of('helps', rate):.4g} tokens/s",
            )
        )
    note = f"Decided by {prediction.text('dominant_term')}; rates: {prediction.text('source')}."
    return Table("Predicted speed", note, ("what", "how much"), rows)


def _zero3(zero3: Fields) -> Picture:
    found = zero3.object("parts_per_rank")
    held = {part: found.object(part) for part in found.names()}
    devices = [device for device in _DEVICES if any(sizes.has(device) for sizes in held.values())]
    parts: Mapping[str, Sequence[float]] = {
        part: [float(sizes.count(device)) if sizes.has(device) else 0.0 for device in devices]
        for part, sizes in held.items()
    }
    title = f"ZeRO-3: what each of {zero3.count('ranks')} ranks holds"
    return bars_picture(
        "zero3", title, Bars(devices, parts, [None] * len(devices)), "Bytes of one rank.", "home"
    )


def _catalog(entries: Sequence[Fields], fields: Fields) -> Picture:
    rows, points = [], []
    for entry in entries:
        name, cost = entry.text("name"), entry.number("cost")
        if entry.has("refused"):
            rows.append((name, f"{cost:g}", "-", "-", entry.text("refused")))
            continue
        rate, price = entry.number("tokens_per_second"), entry.number("cost_of_a_million_tokens")
        rows.append((name, f"{cost:g}", f"{price:.4g}", f"{rate:.4g}", entry.text("dominant")))
        points.append((name, rate, price))
    if not points:
        raise fields.wrong("one machine or more that holds the model", [], "catalog")
    note = "Cheapest first. Predicted by rates of the catalog; costs are those of its file."
    table = Table(
        "Machines by cost",
        note,
        ("machine", "cost an hour", "cost of 1M tokens", "tokens/s", "decided by"),
        rows,
    )
    alt = (
        f"{len(points)} machines by tokens a second and cost of a million tokens; the cheapest is "
        f"{points[0][0]}."
    )
    drawing = Scatter("", "tokens a second", "cost of a million tokens", points)
    return Picture(
        "catalog", "Machines by speed and cost (lower and further right is better)", alt, drawing, table
    )


def _ladder(ladder: Fields) -> Picture:
    rungs = ladder.objects("rungs")
    if not rungs:
        raise ladder.wrong("one format or more", [], "rungs")
    weights, totals = ([rung.count(name) for rung in rungs] for name in ("weights_nbytes", "total_nbytes"))
    others = [max(total - size, 0) for total, size in zip(totals, weights, strict=True)]
    limit = ladder.number("budget_nbytes")
    bars = Bars(
        [rung.text("name") for rung in rungs],
        {"weights": weights, "cache and activations": others},
        [limit] * len(rungs),
    )
    return bars_picture(
        "ladder", "Formats against the budget, best first", bars, ladder.text("note"), "format"
    )
    return bars_picture(
        "ladder", "Formats against the limit, best first", bars, ladder.text("note"), "format"
    )
