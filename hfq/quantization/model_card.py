"""Model card of a quantized checkpoint, with a section on the quantization."""

from __future__ import annotations

import math
import re
from pathlib import Path

from hfq.checkpoint import Checkpoint
from hfq.quantization.calibration_data import Calibration
from hfq.quantization.progress import QuantizeReport
from hfq.recipes.recipe import Recipe
from hfq.version import __version__

__all__ = ["model_card"]

_HEADING = "## Quantization with hfq"


def model_card(
    text: str,
    source: Checkpoint,
    recipe: Recipe,
    report: QuantizeReport,
    dense: list[str],
    calibration: Calibration | None,
) -> str:
    """Returns the text of README.md.

    Args:
        text: The source's README.md, or an empty string.
        source: The float checkpoint.
        recipe: Method and options.
        report: Report of the run.
        dense: Linear layers that stay unquantized.
        calibration: Calibration data, or None.
    """
    body = (
        text.partition(_HEADING)[0].rstrip()
        or f"# {re.sub(r'[^ -~]', '?', Path(source.root).name)}, quantized"
    )
    options = recipe.chosen()
    options |= {"clip_search": recipe.narrows} if "clip_search" in options else {}
    losses = {
        layer.name: layer.loss
        for layer in report.layers
        if layer.loss is not None and math.isfinite(layer.loss)
    }
    nearest = [layer.name for layer in report.layers if layer.method != recipe.method]
    plain = [layer.name for layer in report.layers if layer.method == "awq" and layer.exponent is None]
    few = [
        layer.name
        for layer in report.layers
        if layer.tokens is not None and layer.method == recipe.method and layer.tokens < 128
    ]
    lines = [
        f"Written by hfq {__version__} from `{Path(source.root).name}`: {len(report.layers)} linear layers "
        f"as {report.format}.",
        "",
        "| option | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in options.items()),
    ]
    if calibration is not None:
        samples, length = calibration.tokens.shape
        lines += [f"| calibration | {samples} sequences of {length} tokens of {calibration.source} |"]
        lines += [f"| sha256 of the tokens | {calibration.digest} |"]
    if losses:
        kind = "of outputs on the calibration data" if calibration is not None else "of weights"
        worst = max(losses, key=lambda name: losses[name])
        lines += [
            "",
            f"Mean squared error {kind}: {sum(losses.values()) / len(losses):.3g} on average, "
            f"{losses[worst]:.3g} in {worst}.",
        ]
    for block, (before, after) in report.distilled.items():
        kept = (
            f"fell from {before:.3g} to {after:.3g}"
            if after < before
            else f"is {before:.3g}: the trained values were not kept"
        )
        lines += ["", f"Distillation of {block}: the mean squared error of its outputs {kept}."]
    told = (
        ("Unquantized", dense),
        ("Rounded to nearest", nearest),
        ("Reached by fewer than 128 tokens", few),
        ("Rounded without scaling, because no preceding module can absorb a scale", plain),
    )
    for what, names in told:
        if names:
            lines += ["", f"{what}: {', '.join(names)}."]
    return "\n".join([body, "", _HEADING, "", *lines, ""])
