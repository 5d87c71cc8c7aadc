"""`hfq formats`: lists format variants from the registry.

With `--markdown` it prints the first part of the page docs/reference/formats.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hfq.cli.fitting_table import FittingTable

if TYPE_CHECKING:
    from hfq.formats import FormatVariant

__all__ = ["as_markdown", "formats"]

# ruff: noqa: E501  (rows of a table)
_HEAD = """# Supported formats

hfq detects the format of each layer from its tensors. `make docs` generates this page from the
registry of formats and from the tables of the tests.

Every variant in this table is tested on the CPU and on disk: logits are bit-identical with all
layers in memory, one layer and the head on disk, and all layers on disk. Saving writes the bytes
that were loaded. `make interop` repeats this on files of other tools. The CUDA code has never run:
[Hardware status](../explanation/hardware_status.md).

| column | value | meaning |
|---|---|---|
| read test | writer's files | Files that the named tool wrote (their number follows) dequantize to the same bits as with the tool's own code (`tests/formats/test_goldens.py`, `tests/data/goldens`) |
| read test | own files | Files that hfq wrote from the published description of the format |
| hfq writes | yes | `hfq quantize` or `hfq convert` writes it for other tools |
| hfq writes | for tests | Tests write it, by rounding to nearest |
| test cases | | Cases of the contract tests (`tests/contract/cases.py`) |

| variant | written by | tensors on disk | read test | hfq writes | test cases |
|---|---|---|---|---|---|
"""
_UNSUPPORTED = """
## Unsupported formats

hfq recognizes these formats and raises an error that names them.

| format | recognized by | reason | fix |
|---|---|---|---|
"""
_EXPERTS = """
## Experts and fused layers

`QuantizedExperts` replaces transformers' fused experts. A checkpoint may store experts one by one
(`experts.<n>.gate_proj`, `w1`, `w2`, `w3`, under `mlp`, `block_sparse_moe`, or a name that
transformers renames), or fused, with codes in three dimensions. This covers Mixtral, Qwen2-MoE,
Qwen3-MoE, DeepSeek-V2 and -V3, gpt-oss, GraniteMoe, Llama 4, Nemotron-H (whose experts have no
gate), and other classes whose experts transformers fuses in its usual way. Each expert keeps its
own quantized weights. Only routed experts compute, and only routed experts are read from disk.

Some checkpoints store a linear layer `gate_up_proj` as `gate_proj` and `up_proj`: gptqmodel does so
for Phi-3 and GLM. Both become one `ConcatLinear`.
"""
_GGUF = """
## GGUF

hfq reads GGUF files of versions 2 and 3: [Load GGUF files](../how_to/load_gguf.md). Layers may have
different types. Dequantized blocks are bit-identical to ggml's
(`tests/formats/codecs/ggml/test_blocks.py`). Every type is tested on the CPU, on disk, and on
simulated accelerators (`tests/contract/test_contract_gguf.py`), and some under ZeRO-3. Weights may
also be F32, F16, or BF16. Q8_1 and Q8_K are types of activations. A type that is not listed raises
an error that names it.

| type | weights of a block | bytes of a block | bits per weight |
|---|---|---|---|
{types}

These architectures (`general.architecture`) are read, with the names and layouts of
`hfq/checkpoint/gguf/architectures.py`. `llama` includes Mistral and Mixtral, `deepseek2` also
DeepSeek-V3 and GLM-4.7-Flash. Another one raises an error that names it:
[Add a GGUF architecture](../contributing/add_a_gguf_architecture.md).

| architecture | without config.json |
|---|---|
{architectures}
"""


def formats(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the formats page of the documentation.")
    ] = False,
) -> None:
    """Lists the formats that hfq reads, and those that it recognizes and does not support."""
    from hfq.cli.console import EscapingConsole
    from hfq.formats import FORMATS
    from hfq.formats.detection.unsupported import REFUSED

    if markdown:
        print(as_markdown(), end="")
        return
    table = FittingTable("variant", "format", "tensors", "written by")
    for name, cls in FORMATS.items():
        for variant in cls.variants:
            table.add_row(variant.name, name, variant.tensors, variant.writers)
    table.add_row(f"GGUF ({', '.join(_block_types())})", "gguf", "NAME.weight of *.gguf", "llama.cpp")
    console = EscapingConsole()
    console.print(table)
    console.print(f"unsupported: {', '.join(REFUSED)}")


def as_markdown() -> str:
    """Returns the part of docs/reference/formats.md that the registry determines."""
    from hfq.formats import FORMATS
    from hfq.formats.detection.unsupported import REFUSED

    rows = [_row(variant) for cls in FORMATS.values() for variant in cls.variants]
    refused = [f"| {name} | {' | '.join(refusal)} |" for name, refusal in REFUSED.items()]
    tables = (_HEAD + "\n".join(sorted(rows)), _UNSUPPORTED + "\n".join(refused))
    return "\n".join((*tables, _EXPERTS, _gguf()))


def _gguf() -> str:
    """Returns the section about GGUF files."""
    from hfq.checkpoint.gguf.architectures import ARCHITECTURES
    from hfq.checkpoint.gguf.block_types import BLOCK_TYPES

    types = [
        f"| {kind.name} | {kind.size} | {kind.nbytes} | {kind.bits:g} |"
        for kind in BLOCK_TYPES.values()
        if kind.dtype == "U8"
    ]
    architectures = [
        f"| {name} | {'yes' if known.builds_config else 'no'} |" for name, known in ARCHITECTURES.items()
    ]
    return _GGUF.format(types="\n".join(types), architectures="\n".join(architectures))


def _block_types() -> list[str]:
    from hfq.checkpoint.gguf.block_types import BLOCK_TYPES

    return [kind.name for kind in BLOCK_TYPES.values() if kind.dtype == "U8"]


def _row(variant: FormatVariant) -> str:
    read = f"writer's files: {len(variant.goldens)}" if variant.goldens else "own files"
    write = "yes" if variant.is_emitted else "for tests"
    cells = [variant.name, variant.writers, variant.tensors, read, write, ", ".join(variant.cases)]
    return f"| {' | '.join(cells)} |"
