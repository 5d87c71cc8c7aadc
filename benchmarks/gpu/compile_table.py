"""Part 2: the machine code of the Triton kernels, and a page of it for GPUs that are not there.

`python -m benchmarks.gpu.compile_table --out DIR` compiles for all architectures and writes
DIR/machine_code.md, without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.bench import Bench, Record, missing
from benchmarks.gpu.machine_code import SHARED_LIMITS, compile_launch, make_launches
from benchmarks.gpu.report import Values, replace_text
from hfq.formats import Format
from hfq.formats.awq import Awq
from hfq.formats.bitsandbytes import Bnb4Bit
from hfq.formats.compressed_tensors import PackQuantized
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.formats.mxfp4 import Mxfp4
from hfq.formats.nvfp4 import Nvfp4
from hfq.tables import Table

__all__ = ["ARCHITECTURES", "FORMATS", "compile_variant", "measure", "tables", "values"]

SIZE = 4096
FORMATS: dict[str, Format] = {
    "gptq4": Gptq(4, 128, zero_reading="word_plus_one"),
    "int4 in rows": PackQuantized(4, scale_shape=(SIZE, SIZE // 128), width=SIZE // 8).sized(SIZE, SIZE),
    "mxfp4": Mxfp4(),
    "nvfp4": Nvfp4(),
    "fp8": Fp8(strategy="block", block_structure=(128, 128)),
    "awq": Awq(group_size=128),
    "nf4": Bnb4Bit(blocks=SIZE * SIZE // 64).sized(SIZE, SIZE),
}
ROWS, DRY_ROWS = (1, 2, 4, 16, 64), (1, 16)
ARCHITECTURES = (80, 86, 89, 90, 120, "gfx942")

Variant = tuple[str, int | str, int]
"""(format, architecture, rows)."""


def measure(bench: Bench) -> Iterator[Record]:
    """Yields the counts of each kernel, for the device or for 9.0 in a dry run."""
    if importlib.util.find_spec("triton") is None:
        yield missing("compiled", "triton is not installed")
        return
    architecture = 90
    if not bench.is_dry:
        major, minor = torch.cuda.get_device_capability(bench.device)
        architecture = 10 * major + minor
    for name in ("gptq4", "mxfp4") if bench.is_dry else FORMATS:
        for rows in DRY_ROWS if bench.is_dry else ROWS:
            try:
                yield from compile_variant((name, architecture, rows))
            except Exception as error:
                yield bench.outlived("compiled", error, format=name, rows=rows)


def tables(records: list[Record]) -> list[Table]:
    """Returns the counts of each kernel."""
    rows = [
        [
            record["format"],
            _dotted(record["architecture"]),
            str(record["rows"]),
            record["kernel"],
            str(record["registers"]),
            str(record["stack"]),
            f"{record['shared']:,}",
            f"{record['instructions']:.1f}",
            ", ".join(f"{count} {load}" for load, count in record["loads"].items()),
            str(record["tensor"]),
        ]
        for record in records
        if "missing" not in record
    ]
    heads = ["format", "architecture", "rows", "kernel", "registers", "stack, B", "shared, B"]
    heads += ["instructions/weight", "loads", "tensor core instructions"]
    return [Table("Kernels", "Loads and instructions are those of the loop.", heads, rows)]


def values(records: list[Record], ceilings: dict[str, float]) -> Values:
    """Returns the most bytes that a kernel for one row spills."""
    stacks = [record["stack"] for record in records if record.get("rows") == 1 and "missing" not in record]
    return {"spills": float(max(stacks))} if stacks else {}


def compile_variant(variant: Variant, experts: int = 0) -> list[Record]:
    """Returns the counts of the kernels that multiply, without the one that prepares activations.

    Args:
        variant: The variant.
        experts: The number of experts; 0 for a layer by itself.
    """
    name, architecture, rows = variant
    labels = {"kind": "compiled", "format": name, "architecture": architecture, "rows": rows}
    return [
        {**labels, "kernel": launch.kernel.__name__, **asdict(compile_launch(launch, given, architecture))}
        for launch, given in make_launches(FORMATS[name], SIZE, SIZE, rows, torch.bfloat16, experts)
        if launch.kernel.__name__ != "prepare"
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles for all architectures in two processes, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.compile_table")
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args(arguments).out
    variants = [(name, target, rows) for name in FORMATS for target in ARCHITECTURES for rows in ROWS]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        records = [record for found in pool.map(compile_variant, variants, chunksize=4) for record in found]
    limits = ", ".join(f"{_dotted(key)}: {value:,}" for key, value in SHARED_LIMITS.items())
    (table,) = tables(records)
    text = f"# Machine code of the Triton kernels\n\n{_ABOUT}\n\nShared memory of a program: {limits}.\n\n"
    replace_text(out / "machine_code.md", text + table.to_markdown() + "\n")


_ABOUT = """Compiled by Triton for GPUs that are not there, for layers of 4096 x 4096 and bfloat16:
`python -m benchmarks.gpu.compile_table --out docs/benchmarks`. Nothing here ran on a GPU.
Instructions are those of the loop, per weight that a thread decodes."""


def _dotted(architecture: Any) -> str:
    return architecture if isinstance(architecture, str) else f"{architecture // 10}.{architecture % 10}"


if __name__ == "__main__":
    main()
