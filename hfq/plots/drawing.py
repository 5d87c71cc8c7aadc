"""Charts as PNG, and as SVG in the color of the surrounding text, drawn without a display."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hfq.errors import SetupError
from hfq.plots.section import Picture

__all__ = ["COLOURS", "INK", "MUTED", "draw_png", "draw_svg"]

INK = "#1f2329"
"""Color of text and axes. An SVG uses the color of the surrounding text instead."""

MUTED = "#8a9099"
"""Color of background elements, legible on white and on black."""

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9")
"""Okabe and Ito's colors for color-blind readers (https://jfly.uni-koeln.de/color)."""

_STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "hatch.linewidth": 0.6,
    "svg.fonttype": "none",
    "axes.unicode_minus": False,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
}


def draw_png(picture: Picture) -> bytes:
    """Draws a picture as PNG on white.

    Raises:
        SetupError: matplotlib is not installed.
    """
    with _drawn(picture) as figure:
        figure.suptitle(picture.title, x=0.01, ha="left", fontsize=12)
        return _saved(figure, format="png", dpi=120, facecolor="white")


def draw_svg(picture: Picture, prefix: str) -> str:
    """Draws a picture as an `<svg>` element without background, for a page with others.

    Args:
        picture: The picture.
        prefix: Prefix of all ids, which must be unique within the page.

    Raises:
        SetupError: matplotlib is not installed.
    """
    with _drawn(picture) as figure:
        text = _saved(figure, format="svg", transparent=True, metadata={"Date": None}).decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL).replace(
        "*{stroke-", "svg *{stroke-"
    )
    text = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{prefix}-", text)
    return text.replace(INK, "currentColor")


@contextmanager
def _drawn(picture: Picture) -> Iterator[Any]:
    try:
        import matplotlib
        from cycler import cycler
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SetupError(
            "Charts require matplotlib, which is not installed.",
            expected="matplotlib 3.8 or newer",
            found="none",
            fix="Run pip install 'hfq[plots]'.",
        ) from error
    style: Any = {**_STYLE, "axes.prop_cycle": cycler(color=COLOURS), "svg.hashsalt": picture.name}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph .* missing"
        )  # names may contain characters that the font lacks
        figure = Figure(layout="constrained")
        picture.drawing.draw(figure)
        yield figure


def _saved(figure: Any, **options: Any) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, **options)
    return target.getvalue()
