"""Rows of `real_sizes`: a model, its memory, and the ways to run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hfq.errors import SetupError

__all__ = ["BF16", "CASES", "GGUF", "GPTQ", "HFQ", "Case", "Contender", "find_rows"]

GGUF, GPTQ, BF16 = "gguf", "gptq4", "bf16"
"""Formats of the models: `gguf`, or a name for `find_layout`."""


@dataclass(frozen=True)
class Contender:
    """One way to run a model.

    Attributes:
        name: Name in tables.
        runtime: A name of `RUNTIMES`.
        format: Format of the model that it runs.
        has_short_read_ahead: True to read the file through a loop device with a read-ahead of 128 KiB.
        options: Options of `HfqConfig`.
        attention: Argument `attn_implementation` of `from_pretrained`; None for its default.
    """

    name: str
    runtime: str
    format: str
    has_short_read_ahead: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    attention: str | None = None


HFQ = (Contender("hfq, GPTQ", "hfq", GPTQ), Contender("hfq, the same GGUF", "hfq", GGUF))
_ROUNDED_HEAD = Contender(
    "hfq, GPTQ, head rounded to FP8, hfq_sdpa",
    "hfq",
    GPTQ,
    options={"quantize_output_head": "fp8"},
    attention="hfq_sdpa",
)
_PLAIN = Contender("transformers, bfloat16", "transformers", BF16)
_ACCELERATE = Contender("accelerate, bfloat16", "accelerate", BF16)
_LLAMA = Contender("llama.cpp, mapped", "llama.cpp", GGUF)
_LLAMA_128 = Contender("llama.cpp, read-ahead 128 KiB", "llama.cpp", GGUF, has_short_read_ahead=True)


@dataclass(frozen=True, eq=False)
class Case:
    """A model with a limit of memory.

    Attributes:
        name: Name of the rows.
        shape: A name of `SHAPES`.
        device_map: Device map of hfq.
        limit: Memory limit in bytes; None for none.
        is_skewed: True if experts' frequencies follow Zipf's law.
        least: Required ratio of the decoding speed to llama.cpp's.
        most_load: Required seconds of a load; None for no requirement.
        has_accelerate: True to run accelerate's offload of an unquantized model, too.
        formats: Formats that hfq runs without llama.cpp. Empty compares GPTQ and GGUF with llama.cpp.
    """

    name: str
    shape: str
    device_map: Any
    limit: float | None = None
    is_skewed: bool = False
    least: float = 1.0
    most_load: float | None = None
    has_accelerate: bool = False
    formats: tuple[str, ...] = ()

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """Ways to run it; without `formats`, the last one is the bar.

        With a memory limit, a long read-ahead of the disk would make llama.cpp read most experts many times.
        """
        if self.formats:
            return tuple(
                _PLAIN if each == BF16 else Contender(f"hfq, {_NAMES[each]}", "hfq", each)
                for each in self.formats
            )
        others = (_ACCELERATE,) if self.has_accelerate else ()
        rounded = (_ROUNDED_HEAD,) if self.limit is None else ()
        return (*HFQ, *rounded, *others, _LLAMA if self.limit is None else _LLAMA_128)

    @property
    def reads_all_layers(self) -> bool:
        """True if each token reads all layers from disk."""
        return self.device_map == _LAYERS_ON_DISK


_NAMES = {
    GPTQ: "GPTQ",
    "awq": "AWQ",
    "fp8": "FP8 blocks",
    "nf4": "NF4",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "int8": "int8",
    "w8a16": "int8 pack-quantized",
}
_LAYERS_ON_DISK = {"": "cpu", "model.layers": "disk"}
CASES = (
    Case("Qwen3-30B-A3B, resident", "qwen3-30b-a3b", {"": "cpu"}, least=0.9, most_load=4.0),
    Case("Qwen3-30B-A3B in 8 GB", "qwen3-30b-a3b", "auto", 8e9, least=1.3),
    Case("Qwen3-30B-A3B in 4 GB", "qwen3-30b-a3b", "auto", 4e9, least=1.3),
    Case("Qwen3-30B-A3B in 8 GB, skewed", "qwen3-30b-a3b", "auto", 8e9, True, least=1.3),
    Case("Qwen3-30B-A3B in 4 GB, skewed", "qwen3-30b-a3b", "auto", 4e9, True, least=1.3),
    Case("Llama-3-8B, resident", "llama-3-8b", {"": "cpu"}),
    Case("Llama-3-8B on disk, 4 GB", "llama-3-8b", _LAYERS_ON_DISK, 4e9, least=2.0, has_accelerate=True),
    Case("Llama-2-13B on disk, 4 GB", "llama-2-13b", _LAYERS_ON_DISK, 4e9, least=2.0),
    Case(
        "Llama-3-8B with 8 of 32 layers, resident", "llama-3-8b-short", {"": "cpu"}, formats=(*_NAMES, BF16)
    ),
    Case("gpt-oss-20b, resident", "gpt-oss-20b", {"": "cpu"}, formats=("mxfp4",)),
    Case("gpt-oss-20b in 8 GB", "gpt-oss-20b", "auto", 8e9, formats=("mxfp4",)),
    Case(
        "Llama-3-70B with 24 of 80 layers, on disk, 4 GB",
        "llama-3-70b-short",
        _LAYERS_ON_DISK,
        4e9,
        formats=(GPTQ,),
    ),
    Case("DeepSeek-V3 with 4 of 61 layers, in 8 GB", "deepseek-v3-short", "auto", 8e9, formats=("fp8",)),
)
"""The cases of the tables."""


def find_rows(
    shapes: Sequence[str] | None = None, texts: Sequence[str] | None = None
) -> dict[Case, tuple[Contender, ...]]:
    """Returns the contenders to measure of each case.

    Args:
        shapes: Names of shapes. None means all.
        texts: Parts of `CASE: CONTENDER`. None means all.

    Raises:
        SetupError: No row has one of these texts.
    """
    rows = [(case, contender) for case in CASES for contender in case.contenders]
    named = {row: f"{row[0].name}: {row[1].name}" for row in rows}
    for text in texts or ():
        if not any(text in name for name in named.values()):
            raise SetupError(
                f"--case {text!r} is in the name of no row.",
                expected="; ".join(named.values()),
                found=text,
                fix="Pass a part of one of these names.",
            )
    found: dict[Case, tuple[Contender, ...]] = {}
    for (case, contender), name in named.items():
        is_named = texts is None or any(text in name for text in texts)
        if is_named and (shapes is None or case.shape in shapes):
            found[case] = (*found.get(case, ()), contender)
    return found
