"""`hfq formats`: lists format variants from the registry.

With `--markdown` it prints the page docs/reference/formats.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hfq.cli.fitting_table import FittingTable

if TYPE_CHECKING:
    from hfq.formats import FormatVariant

__all__ = ["as_markdown", "formats"]

# ruff: noqa: E501  (rows of a table)
_HEAD = """# Dialects

Made by `hfq formats --markdown` from the registry (`make docs`); a test compares the two.

| cell | how it is tested |
|---|---|
| read | **golden**: a file that the named tool wrote, dequantized as the tool's own code does, bit for bit (`tests/formats/test_goldens.py`, files in `tests/data/goldens`); **contract**: files that hfq packed after the dialect's published format alone |
| write | **emitted**: hfq writes it for other readers; **tests**: hfq packs it (round to nearest), for its own tests |
| save back | the contract suite: every packed tensor of a loaded model is saved with the bytes it was loaded with |
| CPU, disk | the contract suite: the same logits bit for bit resident, half on disk, all on disk; `make interop` the same on other tools' files |
| CUDA | the code is written, and has not run: no GPU has been at hand |
| ZeRO-3 | `tests/distributed`: one contract row of each class of dialects on two CPU ranks, sharded, the same logits bit for bit; GPTQ, FP8, int8 and nf4 also on three, and with every home for shards: [placements.md](placements.md) |

| dialect | written by | tensors on disk | read | write | save back | CPU | CUDA | disk | ZeRO-3 | contract rows |
|---|---|---|---|---|---|---|---|---|---|---|
"""
_TAIL = """
## Experts

Experts that a checkpoint stores one by one (`experts.<n>.gate_proj`, `w1`, `w2`, `w3`, under `mlp`, `block_sparse_moe` or any name that
transformers renames), or fused with packed codes in three dimensions, become a `QuantizedExperts` module in the place of transformers' fused
experts: Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2 and -V3, gpt-oss, GraniteMoe, Llama 4, Nemotron-H (whose experts have no gate) and the other classes whose experts
transformers fuses in its usual way. Each expert keeps its own packed rows; only routed experts compute, and of those that rest on disk only routed ones are read.

A linear layer `gate_up_proj` that a checkpoint stores as `gate_proj` and `up_proj`, as gptqmodel does those of Phi-3 and GLM, becomes a `ConcatLinear` of the two.

## Refused by name

| dialect | recognised by | what to do |
|---|---|---|
"""


def formats(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the formats page of the documentation.")
    ] = False,
) -> None:
    """Lists the formats that hfq reads, and those that it recognizes and does not support."""
    from rich.console import Console

    from hfq.formats import FORMATS
    from hfq.formats.detection.unsupported import REFUSED

    if markdown:
        print(as_markdown(), end="")
        return
    table = FittingTable("variant", "format", "tensors", "written by")
    for name, cls in FORMATS.items():
        for variant in cls.variants:
            table.add_row(variant.name, name, variant.tensors, variant.writers)
    console = Console(markup=False)
    console.print(table)
    console.print(f"unsupported: {', '.join(REFUSED)}")


def as_markdown() -> str:
    """Returns the text of docs/reference/formats.md."""
    from hfq.formats import FORMATS
    from hfq.formats.detection.unsupported import REFUSED

    rows = [_row(variant) for cls in FORMATS.values() for variant in cls.variants]
    refused = [f"| {name} | {sign} | {fix} |" for name, (sign, fix) in REFUSED.items()]
    return _HEAD + "\n".join(sorted(rows)) + "\n" + _TAIL + "\n".join(refused) + "\n"


def _row(variant: FormatVariant) -> str:
    read = f"golden × {len(variant.goldens)}" if variant.goldens else "contract"
    write = "emitted" if variant.is_emitted else "tests"
    cells = [
        variant.name,
        variant.writers,
        variant.tensors,
        read,
        write,
        "yes",
        "yes",
        "not run",
        "yes",
        "yes",
        ", ".join(variant.cases),
    ]
    return f"| {' | '.join(cells)} |"
