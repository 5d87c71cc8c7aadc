"""Results of plain transformers with quantized checkpoints, measured on a machine without a GPU."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PLAIN", "VERSIONS", "PlainResult"]


VERSIONS = (
    "transformers 5.23.0 with accelerate 1.15.0, DeepSpeed 0.19.8, compressed-tensors 0.20.0,\n"
    "gptqmodel 7.7.0, bitsandbytes 0.50.2, torchao 0.18.0, optimum-quanto 0.2.7, hqq 0.2.8"
)


@dataclass(frozen=True)
class PlainResult:
    """Results of one method.

    Attributes:
        memory: Result of a load into memory.
        disk: Result of a load with layers on disk.
        saved: Result of loading what was saved again.
        variants: The format variants that the results are about.
        memory_in_short: `memory` for the table of variants; empty to use `memory`.
        disk_in_short: `disk` for the table of variants; empty to use `disk`.
    """

    memory: str
    disk: str
    saved: str
    variants: tuple[str, ...] = ()
    memory_in_short: str = ""
    disk_in_short: str = ""


PLAIN = {
    "fine-grained FP8": PlainResult(
        "dequantized to bfloat16 with a warning (no FP8 unit): 1.69 × the size of the files",
        "writes bfloat16 copies of the layers to the offload folder, and reads them from there",
        "FP8 tensors without a quantization_config; loaded again, logits are wrong by 1.4 (relative)",
        ("FP8 fine-grained (fp32, bf16 or ue8m0 scales)",),
        "dequantized to bfloat16",
        "dequantized, copied to disk",
    ),
    "AutoFP8, vLLM's FP8": PlainResult(
        "reports scales as unexpected, then fails on a dtype",
        "as in memory",
        "-",
        ("AutoFP8, vLLM",),
        "fails",
        "fails",
    ),
    "fbgemm_fp8": PlainResult(
        "error: requires a GPU or an XPU",
        "error",
        "-",
        ("fbgemm_fp8",),
        "error",
        "error",
    ),
    "compressed-tensors": PlainResult(
        "quantized until the first forward pass, which decompresses the model to bfloat16 (float-quantized and "
        "pack-quantized; others by reading the sources)",
        "loads; the first forward pass raises an error (`_hf_hook`)",
        "after a forward pass: bfloat16, labeled as compressed",
        (
            "compressed-tensors float-quantized, mxfp8-quantized",
            "compressed-tensors int-quantized, naive-quantized",
            "compressed-tensors pack-quantized",
            "NVFP4 (compressed-tensors nvfp4-pack-quantized)",
            "MXFP4 (compressed-tensors mxfp4-pack-quantized)",
        ),
        "dequantized in the first pass",
        "the first pass fails",
    ),
    "GPTQ": PlainResult(
        "quantized, with optimum and gptqmodel; the first forward pass repacks; experts of Mixtral and "
        "Qwen3-MoE are random, with a warning",
        "layers stay in memory without a warning; with `offload_buffers=True` the first pass is wrong "
        "by 1.4 (relative), the second raises an error",
        "after a forward pass: the kernel's layout, which does not load again",
        ("GPTQ v1 (checkpoint_format gptq)", "GPTQ v2 (gptq_v2)"),
        "quantized (gptqmodel)",
        "stays in memory, no warning",
    ),
    "AWQ gemm": PlainResult(
        "loads with gptqmodel",
        "not measured",
        "-",
        ("AWQ gemm",),
        "loads (gptqmodel)",
        "not measured",
    ),
    "AWQ gemv, gemv_fast": PlainResult(
        "error from gptqmodel on a CPU",
        "not measured",
        "-",
        ("AWQ gemv", "AWQ gemv_fast, llm-awq"),
        "error",
        "not measured",
    ),
    "bitsandbytes 4-bit": PlainResult(
        "quantized; fused experts stay bfloat16",
        "error; with `llm_int8_enable_fp32_cpu_offload=True` these layers are unquantized",
        "before a forward pass bit-identical; after one, wrong by 0.5 (relative)",
        ("bitsandbytes nf4", "bitsandbytes fp4", "bitsandbytes nf4, double-quantized"),
        "quantized",
        "error",
    ),
    "bitsandbytes 8-bit": PlainResult(
        "not measured",
        "error, as for 4 bits (by reading the sources)",
        "-",
        ("bitsandbytes int8",),
        "not measured",
        "error",
    ),
    "torchao int8": PlainResult(
        "quantized (int4 requires mslk)",
        "error for quantized checkpoints",
        "bit-identical",
        ("torchao int8, intx",),
        "quantized",
        "error",
    ),
    "torchao float8": PlainResult(
        "not measured",
        "error, as for int8 (by reading the sources)",
        "-",
        ("torchao float8 (e4m3, e5m2)",),
        "not measured",
        "error",
    ),
    "optimum-quanto": PlainResult(
        "not measured: the config of files of quanto's own class names no quantization",
        "error",
        "error: not serializable",
        ("optimum-quanto qint4, qint2", "optimum-quanto qint8, qfloat8"),
        "not measured",
        "error",
    ),
    "HQQ": PlainResult(
        "error: not implemented in this version",
        "error",
        "-",
        ("HQQ (8, 4, 3, 2, 1 bits)",),
        "error",
        "error",
    ),
    "ModelOpt": PlainResult(
        "the method is unknown: a warning, quantized tensors are left out, weights are random",
        "as in memory",
        "-",
        (
            "ModelOpt FP8 (tensor, channel, 2-D blocks), MXFP8",
            "ModelOpt W4A16_AWQ, W4A8_AWQ",
            "MXFP4 (ModelOpt)",
            "NVFP4 (ModelOpt)",
        ),
        "random weights, a warning",
        "random weights, a warning",
    ),
    "ModelOpt int8": PlainResult(
        "the method is unknown: a warning, codes are used as weights, scales are left out",
        "the load fails",
        "-",
        ("ModelOpt W8A8 SmoothQuant", "ModelOpt W8A8, W8A16 (not smoothed)"),
        "codes as weights, a warning",
        "fails",
    ),
    "ModelOpt's experts of gpt-oss": PlainResult(
        "the method is unknown: a warning; FP8: codes are used as weights, scales are left out; NVFP4: the "
        "load fails",
        "the load fails",
        "-",
        ("ModelOpt FP8, NVFP4 experts of gpt-oss, Llama 4",),
        "codes as weights, or fails",
        "fails",
    ),
    "gpt-oss MXFP4": PlainResult(
        "dequantized to bfloat16 if triton and kernels are not installed",
        "not measured",
        "-",
        ("MXFP4 experts of gpt-oss",),
        "dequantized to bfloat16",
        "not measured",
    ),
}
"""Results by method. Format variants that are not listed were not measured."""
