"""Quantization methods of transformers and vLLM, and which of their files hfq reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hfq.formats import FORMATS
from hfq.formats.base import FormatVariant

__all__ = ["METHODS", "TRANSFORMERS", "VERSIONS", "Method", "as_markdown"]

TRANSFORMERS = "5.23.0"
VERSIONS = f"transformers {TRANSFORMERS} (`transformers.quantizers.auto`) and of vLLM in 2025 and 2026"
_LOADING = "no files: it quantizes a float checkpoint while loading"


@dataclass(frozen=True)
class Method:
    """A name in a registry.

    Attributes:
        name: The name, which a checkpoint states as `quant_method` or vLLM takes as `quantization`.
        registries: T for transformers, V for vLLM.
        variants: Parts of the names of the variants that hfq reads.
        refusal: The name in the table of unsupported formats; None if hfq reads the files or there are none.
        same_as: The method whose files it uses; None for files of its own.
        note: What hfq does, if it reads no variant.
        writers: The tools that write the files; empty for those of the variants.
        since: The first version of hfq that reads them.
    """

    name: str
    registries: str
    variants: tuple[str, ...] = ()
    refusal: str | None = None
    same_as: str | None = None
    note: str = ""
    writers: str = ""
    since: str = "0.1.0"

    def found_variants(self) -> list[FormatVariant]:
        """Returns the variants that hfq reads."""
        every = [variant for cls in FORMATS.values() for variant in cls.variants]
        return [variant for variant in every if any(part in variant.name for part in self.variants)]

    def cells(self) -> Iterator[str]:
        """Yields the cells of the method's row."""
        yield f"`{self.name}`"
        yield "yes" if "T" in self.registries else ""
        yield "yes" if "V" in self.registries else ""
        found = self.found_variants()
        if self.refusal is not None:
            yield from (f"unsupported: {self.refusal}", "", self.writers)
        elif self.same_as is not None:
            yield from (f"read, as `{self.same_as}`", self.since, f"those of `{self.same_as}`")
        elif found:
            writers = {writer.strip() for variant in found for writer in variant.writers.split(",")}
            made = self.writers or ", ".join(sorted(writers, key=str.lower))
            named = "; ".join([*(variant.name for variant in found), *([self.note] if self.note else [])])
            yield from (f"read: {named}", self.since, made)
        else:
            yield from (self.note, "", "")


_CT = ("compressed-tensors",)
_MODELOPT = ("ModelOpt",)
METHODS = (
    Method("aqlm", "TV", refusal="AQLM", writers="AQLM"),
    Method(
        "auto-round",
        "TV",
        (
            "GPTQ v1",
            "AWQ gemm",
            "float-quantized",
            "MXFP4 (compressed",
            "NVFP4 (compressed",
            "MXINT4",
            "UE5M3",
        ),
        writers="auto-round",
    ),
    Method("awq", "TV", ("AWQ gemm", "AWQ gemv")),
    Method("bitnet", "T", ("BitNet",)),
    Method("bitsandbytes", "V", ("bitsandbytes",)),
    Method("bitsandbytes_4bit", "T", ("bitsandbytes nf4", "bitsandbytes fp4")),
    Method("bitsandbytes_8bit", "T", ("bitsandbytes int8",)),
    Method("compressed-tensors", "TV", _CT, note="among them w4a-fp8 and the int4 experts of Kimi-K2"),
    Method("eetq", "T", refusal="EETQ", writers="transformers (on CUDA)"),
    Method("fbgemm_fp8", "TV", ("fbgemm_fp8",)),
    Method("fouroversix", "T", refusal="Four Over Six", writers="fouroversix"),
    Method(
        "fp8",
        "TV",
        ("FP8 fine-grained", "AutoFP8", "gptqmodel FP8", "FP8 of DeepSeek", "FP8 e5m2", "DeepSeek-V4"),
    ),
    Method("fp_quant", "TV", refusal="FP-Quant", writers="fp_quant"),
    Method("gemma", "T", ("Gemma QAT",)),
    Method("gguf", "TV", ("GGUF blocks",), note="GGUF files", writers="llama.cpp, gptqmodel"),
    Method("gptq", "TV", ("GPTQ v1", "GPTQ v2", "GPTQ planar")),
    Method("higgs", "T", refusal="HIGGS", writers="transformers (on CUDA)"),
    Method("hqq", "TV", ("HQQ",)),
    Method("metal", "T", ("MLX affine",)),
    Method("mxfp4", "TV", ("MXFP4 experts of gpt-oss",)),
    Method("mxfp8", "TV", ("MXFP8 with weight_scale_inv",)),
    Method("nvfp4", "T", note=_LOADING),
    Method("quanto", "T", ("optimum-quanto",)),
    Method("quark", "TV", ("Quark", "MXFP6")),
    Method("sinq", "T", refusal="SINQ", writers="sinq"),
    Method("spqr", "T", refusal="SpQR", writers="SpQR"),
    Method("torchao", "TV", ("torchao",)),
    Method("vptq", "T", refusal="VPTQ", writers="VPTQ"),
    Method("auto_awq", "V", same_as="awq"),
    Method("auto_gptq", "V", same_as="gptq"),
    Method("awq_marlin", "V", same_as="awq"),
    Method("bitblas", "V", refusal="bitblas", writers="gptqmodel"),
    Method("cpu_awq", "V", same_as="awq"),
    Method("deepgemm_fp8", "V", same_as="fp8"),
    Method("deepseek_v4_fp8", "V", same_as="fp8"),
    Method("deepspeedfp", "V", note=_LOADING),
    Method("experts_int8", "V", note=_LOADING),
    Method("fp8_per_block", "V", note=_LOADING),
    Method("fp8_per_channel", "V", note=_LOADING),
    Method("fp8_per_tensor", "V", note=_LOADING),
    Method("gpt_oss_mxfp4", "V", same_as="mxfp4"),
    Method("gptq_bitblas", "V", same_as="gptq"),
    Method("gptq_marlin", "V", same_as="gptq"),
    Method("gptq_marlin_24", "V", refusal="marlin-24", writers="older tools"),
    Method("inc", "V", same_as="auto-round"),
    Method("int8_per_channel_weight_only", "V", note=_LOADING),
    Method("ipex", "V", note="no files: kernels for those of `gptq` and `awq`"),
    Method("marlin", "V", refusal="GPTQ Marlin", writers="AutoGPTQ"),
    Method("modelopt", "V", _MODELOPT),
    Method("modelopt_fp4", "V", same_as="modelopt"),
    Method("modelopt_mixed", "V", same_as="modelopt"),
    Method("modelopt_mxfp8", "V", same_as="modelopt"),
    Method("moe_wna16", "V", note="no files: kernels for experts of `gptq` and `awq`"),
    Method("neuron_quant", "V", note=_LOADING),
    Method("nvfp4_per_token", "V", note=_LOADING),
    Method("online", "V", note=_LOADING),
    Method("petit_nvfp4", "V", same_as="modelopt"),
    Method("ptpc_fp8", "V", note=_LOADING),
    Method("qqq", "V", refusal="QQQ", writers="gptqmodel, QQQ"),
    Method("rtn", "V", note=_LOADING),
    Method("tpu_int8", "V", note=_LOADING),
)
"""Every method of both registries: those of transformers, then those of vLLM alone."""

_HEAD = """
## Methods of transformers and vLLM

A checkpoint names its method as `quant_method`. This table has every name in the registries of
{versions}.
hfq reads MLX, `blockwise_int8`, `w8a8_int8`, and QMoE as well, which neither registry has.

| method | transformers | vLLM | hfq | since | files made by |
|---|---|---|---|---|---|
"""


def as_markdown() -> str:
    """Returns the table of methods."""
    rows = "\n".join(f"| {' | '.join(method.cells())} |" for method in METHODS)
    return f"{_HEAD.format(versions=VERSIONS)}{rows}\n"
