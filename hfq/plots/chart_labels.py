"""Labels next to points, placed without overlap and within the axes if possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["Box", "choose_places", "label_points"]

Box = tuple[float, float, float, float]
"""(left, bottom, right, top)."""

_FONT_SIZE = 8
_HEIGHT = 1.25 * _FONT_SIZE
_OFFLOADED = 5.0


def label_points(figure: Any, axes: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Writes the names of points next to them, after everything else is drawn.

    Args:
        figure: matplotlib figure.
        axes: Its axes, which contain the points.
        points: (name, x, y).
    """
    figure.draw_without_rendering()  # fixes the position of the axes
    scale = 72 / figure.dpi
    pixels = axes.transData.transform([(x, y) for _, x, y in points])
    places = [(float(x) * scale, float(y) * scale) for x, y in pixels]
    frame = axes.get_window_extent()
    bounds = frame.x0 * scale, frame.y0 * scale, frame.x1 * scale, frame.y1 * scale
    options = {"textcoords": "offset points", "fontsize": _FONT_SIZE, "va": "bottom", "ha": "left"}
    names = [axes.annotate(name, (x, y), xytext=(0, 0), **options) for name, x, y in points]
    widths = [name.get_window_extent().width * scale for name in names]
    for name, (left, bottom), (x, y) in zip(
        names, choose_places(places, widths, bounds), places, strict=True
    ):
        name.set_position((left - x, bottom - y))
        name.set_in_layout(False)  # keeps the axes in place


def choose_places(
    points: Sequence[tuple[float, float]], widths: Sequence[float], bounds: Box
) -> list[tuple[float, float]]:
    """Returns the lower left corner of each name, at the nearest free place.

    Args:
        points: (x, y) of each point.
        widths: Width of each name, in the same unit.
        bounds: Area for the names.
    """
    taken: list[Box] = [(x - 3, y - 3, x + 3, y + 3) for x, y in points]
    chosen = []
    for (x, y), width in zip(points, widths, strict=True):
        boxes = list(_candidates(x, y, width))
        box = min(
            boxes, key=lambda box: sum(_meet(box, other) for other in taken) + (not _is_within(box, bounds))
        )
        taken.append(box)
        chosen.append((box[0], box[1]))
    return chosen


def _candidates(x: float, y: float, width: float) -> Iterator[Box]:
    """Yields places to the right and left of a point, then further up and down."""
    for step in range(6):
        for sign in (1, -1) if step else (1,):
            middle = y + sign * step * 0.75 * _HEIGHT
            for left in (x + _OFFLOADED, x - _OFFLOADED - width):
                yield left, middle - _HEIGHT / 2, left + width, middle + _HEIGHT / 2


def _meet(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _is_within(box: Box, bounds: Box) -> bool:
    return bounds[0] <= box[0] and bounds[1] <= box[1] and box[2] <= bounds[2] and box[3] <= bounds[3]
