"""`hfq inspect MODEL`: shows the contents of a checkpoint, from its headers."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfq.cli.fitting_table import FittingTable
from hfq.cli.model_argument import Model, Revision, model_headers

if TYPE_CHECKING:
    from hfq.checkpoint import Checkpoint
    from hfq.formats import Format
    from hfq.tensor_spec import TensorInfo

__all__ = ["inspect", "inspect_checkpoint"]

_LAYER = re.compile(r"^(?:.*\.)?(?:layers|h|blocks|block)\.(\d+)\.")


def inspect(
    model: Model,
    revision: Revision = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels", help="Show the kernel of each format on this CPU, and why others do not run."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every module.")] = False,
) -> None:
    """Shows formats, bits per weight, bytes per layer, alignment, and anything unusual.

    For a model on the Hub, only headers are downloaded.
    """
    from hfq.checkpoint import Checkpoint

    with model_headers(model, revision) as found:
        report = {**inspect_checkpoint(Checkpoint.open(found.folder), kernels), "path": found.name}
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)


def inspect_checkpoint(checkpoint: Checkpoint, kernels: bool = False) -> dict:
    """Returns the report as JSON-ready data, from headers and JSON files only.

    Args:
        checkpoint: Checkpoint to report on.
        kernels: True to report for each module {kernel: reason why it does not run}, with None for the kernel
            that runs. The first use compiles the C++ kernel.

    Raises:
        FormatError: The config contradicts the tensors.
    """
    from hfq.formats import NotQuantizedFormatError, detect_formats, tensors_by_module
    from hfq.formats.configs.source_config import detection_hints, source_config

    modules = tensors_by_module(checkpoint.tensors)
    source = source_config(checkpoint) or {}
    odd: list[str] = []
    try:
        formats = detect_formats(modules, detection_hints(checkpoint, source))
    except NotQuantizedFormatError as error:
        formats, odd = {}, [error.message, f"found: {error.found}"]
    packed = [_packed_module(name, formats[name], modules[name]) for name in formats]
    for entry in packed if kernels else ():
        entry["kernels"] = _kernels(formats[entry["module"]], modules[entry["module"]])
    counted = [entry for entry in packed if entry["weights"]]  # headers do not tell the bits of every format
    weights = sum(entry["weights"] for entry in counted)
    per_layer: Counter[str] = Counter()
    for name, info in checkpoint.tensors.items():
        layer = _LAYER.match(name)
        per_layer[f"layer {layer[1]}" if layer else "outside layers"] += info.nbytes
    return {
        "path": checkpoint.root,
        "quant_method": source.get("quant_method"),
        "files": {Path(file).name: header.nbytes for file, header in checkpoint.headers.items()},
        "nbytes": checkpoint.nbytes,
        "tensors": len(checkpoint.tensors),
        "formats": dict(Counter(entry["format"] for entry in packed)),
        "bits_per_quantized_weight": round(sum(e["nbytes"] for e in counted) * 8 / weights, 3)
        if weights
        else None,
        "quantized_nbytes": sum(entry["nbytes"] for entry in packed),
        "unquantized_nbytes": sum(
            i.nbytes for n, ts in modules.items() if n not in formats for i in ts.values()
        ),
        "nbytes_by_layer": dict(per_layer),
        "alignment": _alignment(checkpoint.tensors.values()),
        "odd": odd + _oddities(modules, formats),
        "modules": packed,
    }


def _packed_module(name: str, found: Format, tensors: dict[str, TensorInfo]) -> dict:
    codes, bits = tensors.get(found.codes_name), found.bits_per_code
    weights = int(codes.nbytes * 8 // bits) if codes is not None and bits else 0
    nbytes = sum(info.nbytes for info in tensors.values())
    entry = {"module": name, "format": found.describe(), "weights": weights, "nbytes": nbytes}
    return entry | {"bits_per_weight": round(nbytes * 8 / weights, 3) if weights else None}


def _kernels(found: Format, tensors: dict[str, TensorInfo]) -> dict[str, str | None]:
    from hfq.kernels.registry import explain_kernels

    try:
        # shapes are enough here
        out_features, in_features = found.shape(tensors)  # type: ignore[arg-type]
    except (KeyError, ValueError, TypeError, AttributeError):
        out_features, in_features = 0, 0  # flattened: only the model has the sizes
    return explain_kernels("auto", found, in_features, out_features)


def _alignment(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    """Returns {alignment in bytes: number of tensors}, each tensor at its largest alignment."""
    found: Counter[str] = Counter()
    for info in tensors:
        found[
            str(next(size for size in (4096, 256, 64, 16, 8, 4, 2, 1) if info.range.offset % size == 0))
        ] += 1
    return dict(sorted(found.items(), key=lambda item: -int(item[0])))


def _oddities(modules: dict[str, dict[str, TensorInfo]], formats: dict[str, Format]) -> list[str]:
    split = [name for name in formats if len({info.range.file for info in modules[name].values()}) > 1]
    known: dict[str, list[str]] = defaultdict(list)
    for name in formats:
        if name.rpartition(".")[2] == "lm_head":
            known["quantized lm_head"].append(name)
        if "bias" in modules[name]:
            known["quantized modules with a bias"].append(name)
    notes = [f"{len(split)} modules have tensors in more than one file, such as {split[0]}"] if split else []
    return notes + [f"{what}: {len(names)}, such as {names[0]}" for what, names in known.items()]


def _print(report: dict) -> None:
    from hfq.cli.console import EscapingConsole

    console = EscapingConsole()
    console.print(f"{report['path']}  quant_method={report['quant_method']}")
    files = report["files"]
    console.print(f"{report['nbytes']:,} bytes in {len(files)} file(s), {report['tensors']} tensors")
    bits = report["bits_per_quantized_weight"]
    console.print(
        f"quantized {report['quantized_nbytes']:,} B ({'?' if bits is None else bits} bits per weight), "
        f"unquantized {report['unquantized_nbytes']:,} B"
    )
    table = FittingTable("format", "modules", "bits per weight", "bytes")
    for variant, count in report["formats"].items():
        entries = [entry for entry in report["modules"] if entry["format"] == variant]
        nbytes, weights = sum(e["nbytes"] for e in entries), sum(e["weights"] for e in entries)
        table.add_row(variant, str(count), f"{nbytes * 8 / weights:.3f}" if weights else "?", f"{nbytes:,}")
    console.print(table)
    layers = FittingTable("layer", "bytes")
    for where, nbytes in report["nbytes_by_layer"].items():
        layers.add_row(where, f"{nbytes:,}")
    console.print(layers)
    console.print(f"alignment of tensors in their files: {report['alignment']}")
    chosen = Counter(
        (entry["format"], tuple(entry["kernels"].items()))
        for entry in report["modules"]
        if "kernels" in entry
    )
    for (variant, reasons), count in chosen.items():
        others = "; ".join(f"{name}: {reason}" for name, reason in reasons if reason is not None)
        console.print(
            f"{variant}: {count} by {next(name for name, reason in reasons if reason is None)} ({others})"
        )
    for note in report["odd"]:
        console.print(f"note: {note}")
