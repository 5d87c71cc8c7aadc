"""Files next to the shards of a quantized checkpoint.

These are the index, the configs, the tokenizer's files, and the model card.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hfq.checkpoint import Checkpoint
from hfq.checkpoint.write_checkpoint import INDEX, side_files
from hfq.errors import CheckpointError
from hfq.formats import Format, detect_formats, tensors_by_module
from hfq.formats.gptq import Gptq
from hfq.quantization.calibration_data import Calibration
from hfq.quantization.float_checkpoint import Source
from hfq.quantization.journal import Journal
from hfq.quantization.model_card import model_card
from hfq.quantization.progress import QuantizeReport
from hfq.recipes.recipe import Recipe
from hfq.version import __version__

__all__ = ["finish", "side_file_names"]

_WRITTEN = ("config.json", "README.md", "quantize_config.json", INDEX)


def side_file_names(source: Checkpoint) -> set[str]:
    """Returns the names of all files that `finish` may write.

    Raises:
        CheckpointError: A file of the source's folder cannot be copied.
    """
    copied, _ = side_files(source)
    return {*_WRITTEN, *(Path(file).name for file in copied)}


def finish(
    journal: Journal,
    source: Source,
    recipe: Recipe,
    weight_format: Format,
    report: QuantizeReport,
    dense: list[str],
    calibration: Calibration | None,
) -> None:
    """Writes the remaining files, checks the folder's headers, and gives it its final name.

    Args:
        journal: Journal with all shards.
        source: The float checkpoint. Its other files are copied.
        recipe: Method and options.
        weight_format: Format of the quantized layers.
        report: Report for the model card.
        dense: Stored names of linear layers that stay unquantized.
        calibration: Calibration data, or None.

    Raises:
        CheckpointError: A file cannot be written or copied, or the folder does not read back correctly.
    """
    if journal.is_renamed:
        journal.finish()
        return
    config = recipe.quantization_config(weight_format, dense, __version__)
    copied, _ = side_files(source.checkpoint)
    for file in copied:
        if Path(file).name not in _WRITTEN:
            journal.write(Path(file).name, Path(file))
    weight_map = {name: shard for shard, entry in journal.shards.items() for name in entry["tensors"]}
    index = {"metadata": {"total_size": report.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
    journal.write(INDEX, _json(index))
    journal.write("config.json", _json({**source.checkpoint.config, "quantization_config": config}))
    if isinstance(weight_format, Gptq):
        journal.write("quantize_config.json", _json(config))
    card = Path(source.checkpoint.root, "README.md")
    text = card.read_text(encoding="utf-8", errors="replace") if str(card) in copied else ""
    journal.write("README.md", model_card(text, source.checkpoint, recipe, report, dense, calibration))
    _check(journal.folder, source, config, report)
    journal.finish()


def _check(folder: Path, source: Source, config: dict[str, Any], report: QuantizeReport) -> None:
    """Checks that hfq detects the quantized layers, and that all other tensors are unchanged."""
    written = Checkpoint.open(folder)
    found = detect_formats(tensors_by_module(written.tensors), config)
    quantized = {
        source.stored(f"{layer.name}.weight").name.removesuffix(".weight") for layer in report.layers
    }
    kept = {
        name: str(info)
        for name, info in source.checkpoint.tensors.items()
        if name.removesuffix(".weight") not in quantized
    }
    if set(found) != quantized or any(str(written.tensors.get(name)) != text for name, text in kept.items()):
        odd = min(set(found) ^ quantized, default="") or min(
            name for name in kept if str(written.tensors.get(name)) != kept[name]
        )
        raise CheckpointError(
            "The quantized checkpoint does not read back correctly. The output folder was not created.",
            file=folder,
            tensor=odd,
            expected="every layer quantized, and all other tensors unchanged",
            found=str(written.tensors.get(odd)),
            fix="Remove this folder, and run the same command again. If the error remains, report it.",
        )


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
