"""Sections for benchmarks and `hfq evaluate --json`: targets, tables, and a chart."""

from __future__ import annotations

from dataclasses import replace

from hfq.plots.charts import Chart, Lines, Scatter
from hfq.plots.fields import Fields
from hfq.plots.section import Picture, Section
from hfq.tables import Table

__all__ = ["bench_section", "read_chart"]


def bench_section(fields: Fields) -> Section:
    """Returns the section of one benchmark or evaluation.

    Raises:
        SetupError: A field is missing or not valid.
    """
    if not fields.has("tables", "chart"):
        raise fields.wrong(
            "fields tables and chart, which older versions did not write", sorted(fields.names())
        )
    tables = [_table(table) for table in fields.objects("tables")]
    targets = _targets(fields)
    drawing = read_chart(fields.object("chart"))
    picture = Picture(
        "chart",
        drawing.title,
        _alt(drawing),
        replace(drawing, title=""),
        targets or (tables.pop(0) if tables else None),
    )
    return Section(fields.text("title"), fields.pairs("facts"), [picture], tables)


def _table(table: Fields) -> Table:
    header, rows = table.texts("header"), []
    for row in table.items("rows"):
        if not isinstance(row, list) or len(row) != len(header):
            raise table.wrong(f"rows of {len(header)} cells", row, "rows")
        rows.append([table.text_of("rows", cell) for cell in row])
    return Table(table.text("title"), table.text("note"), header, rows)


def _targets(fields: Fields) -> Table | None:
    rows = []
    for target in fields.objects("targets"):
        bound = f"{'≥' if target.raw('at_least') is True else '≤'} {target.number('bound'):g}"
        value = f"{target.number('value'):.3f}" if target.has("value") else "-"
        rows.append((target.text("what"), value, bound, target.text("verdict")))
    return (
        Table("Targets", fields.text("targets_note"), ("what", "measured", "target", ""), rows)
        if rows
        else None
    )


def read_chart(chart: Fields) -> Chart | Lines | Scatter:
    """Returns the chart of a recorded result.

    Raises:
        SetupError: A field is missing or has another type.
    """
    kind = chart.text("kind")
    if kind == "Chart":
        groups = chart.texts("groups")
        scale = chart.text("scale")
        if scale not in ("linear", "log"):
            raise chart.wrong("linear or log", scale, "scale")
        return Chart(chart.text("title"), groups, _series(chart, len(groups)), chart.number("line"), scale)
    if kind == "Scatter":
        points = []
        for point in chart.items("points"):
            if not isinstance(point, list) or len(point) != 3:
                raise chart.wrong("a name, x, and y", point, "points")
            name, *place = point
            x, y = (chart.numbers_of("points", value) for value in place)
            points.append((chart.text_of("points", name), x, y))
        if not points:
            raise chart.wrong("at least one point", [], "points")
        return Scatter(chart.text("title"), chart.text("x"), chart.text("y"), points)
    if kind == "Lines":
        return Lines(chart.text("title"), chart.text("x"), chart.text("y"), _lines(chart))
    raise chart.wrong("Chart, Lines, or Scatter", kind, "kind")


def _lines(chart: Fields) -> dict[str, list[tuple[float, float]]]:
    series = chart.object("series")
    found: dict[str, list[tuple[float, float]]] = {}
    for name in series.names():
        found[name] = []
        for point in series.items(name):
            if not isinstance(point, list) or len(point) != 2:
                raise series.wrong("x and y", point, name)
            x, y = (series.numbers_of(name, value) for value in point)
            found[name].append((x, y))
    if not found:
        raise chart.wrong("one series or more", found, "series")
    return found


def _series(chart: Fields, groups: int) -> dict[str, list[float | None]]:
    series = chart.object("series")
    found: dict[str, list[float | None]] = {}
    for name in series.names():
        values = series.items(name)
        if len(values) != groups:
            raise series.wrong(f"{groups} values, one per group", values, name)
        found[name] = [None if value is None else series.numbers_of(name, value) for value in values]
    if not found or not groups:
        raise chart.wrong("at least one group and one series", found, "series")
    return found


def _alt(chart: Chart | Lines | Scatter) -> str:
    if isinstance(chart, Lines):
        said = "; ".join(
            f"{name}: " + ", ".join(f"{x:.3g} → {y:.3g}" for x, y in points)
            for name, points in chart.series.items()
        )
        return f"Lines of {chart.y} by {chart.x}. {said}."
    if isinstance(chart, Scatter):
        said = "; ".join(f"{name}: {x:.4g}, {y:.4g}" for name, x, y in chart.points)
        return f"Points by {chart.x} and {chart.y}. {said}."
    said = "; ".join(
        f"{group}: "
        + ", ".join(
            f"{name} {values[place]:.3g}"
            for name, values in chart.series.items()
            if values[place] is not None
        )
        for place, group in enumerate(chart.groups)
    )
    return f"Groups of bars. {said}."
