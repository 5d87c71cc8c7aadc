"""Section for `hfq plan --json`: devices, placement map, ZeRO-3, and alternatives."""

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
    "experts_nbytes": "expert cache",
    "kv_cache_nbytes": "KV cache",
    "activations_nbytes": "activations",
}
"""Uses of a device's memory: fields in a report of `hfq plan`, with their names in tables and charts."""

_DEVICES = ("device", "cpu", "nvme")


def plan_section(fields: Fields) -> Section:
    """Returns the section of one plan.

    Raises:
        SetupError: A field is missing or not valid.
    """
    model, work = fields.object("model"), fields.object("workload")
    name = Path(model.text("path")).name or model.text("path")
    facts = {
        "model": f"{model.text('class')} of {model.count('layers')} layers, "
        f"{model.text('formats') or 'unquantized'}",
        "files": f"{model.count('file_nbytes'):,} B",
        "workload": f"batch {work.count('batch')}, context {work.count('context')}, KV cache "
        f"{work.text('kv_dtype')}",
        "machine": _machine(fields.object("machine")),
    }
    pictures: list[Picture] = []
    tables: list[Table] = []
    if fields.has("devices"):
        pictures += [_device_picture(fields.object("devices")), placement_picture(read_modules(fields))]
    if fields.has("prediction"):
        tables.append(_prediction(fields.object("prediction")))
    if fields.has("zero3"):
        pictures.append(_zero3(fields.object("zero3")))
    if fields.has("catalog"):
        pictures.append(_catalog(fields.objects("catalog"), fields))
    if fields.has("ladder"):
        pictures.append(_ladder(fields.object("ladder")))
    if not pictures:
        raise fields.wrong("devices, zero3, catalog, or ladder", sorted(fields.names()))
    return Section(f"{name}: a plan", facts, pictures, tables)


def _machine(machine: Fields) -> str:
    gpus = (
        ", ".join(as_size(machine.numbers_of("gpu_nbytes", size)) for size in machine.items("gpu_nbytes"))
        or "no accelerator"
    )
    return f"{gpus}, {as_size(machine.count('cpu_nbytes'))} of CPU memory"


def _device_picture(devices: Fields) -> Picture:
    names = devices.names()
    found = [devices.object(name) for name in names]
    parts = {title: [device.count(part) for device in found] for part, title in PARTS.items()}
    limits = [
        float(device.count("capacity_nbytes")) if device.has("capacity_nbytes") else None for device in found
    ]
    note = "Bytes on each device: weights stored there, and memory for running the model."
    return bars_picture("devices", "Bytes on each device", Bars(names, parts, limits), note, "device")


def _prediction(prediction: Fields) -> Table:
    rows = [("load from a cold disk", f"{prediction.number('load_seconds'):.4g} s")]
    if prediction.has("tokens_per_second"):
        rows.append(("tokens per second", f"{prediction.number('tokens_per_second'):.4g}"))
    if prediction.has("step_seconds"):
        rows.append(("time per step", f"{prediction.number('step_seconds'):.4g} s"))
    for helped in prediction.items("helps") if prediction.has("helps") else ():
        if not isinstance(helped, list) or len(helped) != 2:
            raise prediction.wrong("pairs of text and tokens per second", helped, "helps")
        what, rate = helped
        rows.append(
            (
                f"with {prediction.text_of('helps', what)}",
                f"{prediction.numbers_of('helps', rate):.4g} tokens/s",
            )
        )
    note = f"Limited by {prediction.text('dominant_term')}; rates: {prediction.text('source')}."
    return Table("Predicted speed", note, ("what", "how much"), rows)


def _zero3(zero3: Fields) -> Picture:
    found = zero3.object("parts_per_rank")
    held = {part: found.object(part) for part in found.names()}
    devices = [device for device in _DEVICES if any(sizes.has(device) for sizes in held.values())]
    parts: Mapping[str, Sequence[float]] = {
        part: [float(sizes.count(device)) if sizes.has(device) else 0.0 for device in devices]
        for part, sizes in held.items()
    }
    title = f"ZeRO-3: bytes on each of {zero3.count('ranks')} ranks"
    return bars_picture(
        "zero3", title, Bars(devices, parts, [None] * len(devices)), "Bytes of one rank.", "device"
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
        raise fields.wrong("at least one machine that holds the model", [], "catalog")
    note = "Cheapest first. Speeds are predicted with the catalog's rates. Costs are from its file."
    table = Table(
        "Machines by cost",
        note,
        ("machine", "cost per hour", "cost of 1M tokens", "tokens/s", "limited by"),
        rows,
    )
    alt = (
        f"{len(points)} machines by tokens per second and cost per million tokens. The cheapest is "
        f"{points[0][0]}."
    )
    drawing = Scatter("", "tokens per second", "cost per million tokens", points)
    return Picture(
        "catalog", "Machines by speed and cost (lower and further right is better)", alt, drawing, table
    )


def _ladder(ladder: Fields) -> Picture:
    rungs = ladder.objects("rungs")
    if not rungs:
        raise ladder.wrong("at least one format", [], "rungs")
    weights, totals = ([rung.count(name) for rung in rungs] for name in ("weights_nbytes", "total_nbytes"))
    others = [max(total - size, 0) for total, size in zip(totals, weights, strict=True)]
    limit = ladder.number("budget_nbytes")
    bars = Bars(
        [rung.text("name") for rung in rungs],
        {"weights": weights, "cache and activations": others},
        [limit] * len(rungs),
    )
    return bars_picture(
        "ladder", "Formats against the limit, best first", bars, ladder.text("note"), "format"
    )
