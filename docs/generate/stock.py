"""What stock tools do with quantized checkpoints on a machine without a GPU, as it was measured before hfq
was written.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PLAIN", "STOCK_VERSIONS", "Stock"]


STOCK_VERSIONS = (
    "transformers 5.23.0 with accelerate 1.15.0, DeepSpeed 0.19.8, compressed-tensors 0.20.0, "
    "gptqmodel 7.7.0, bitsandbytes 0.50.2, torchao 0.18.0, optimum-quanto 0.2.7, hqq 0.2.8"
)


@dataclass(frozen=True)
class Stock:
    """One method: what happens to a model in memory and with layers on disk, and to what is saved; the
    dialects it is about.

    The short texts stand in the matrix; without one the long text does.
    """

    memory: str
    disk: str
    saved: str
    variants: tuple[str, ...] = ()
    memory_in_short: str = ""
    disk_in_short: str = ""


PLAIN = {
    "fine-grained FP8": Stock(
        "dequantized to bfloat16 with a warning (no FP8 unit): 1.69 × the bytes of the files",
        "bfloat16 copies of the layers are written to the offload folder, and read from there",
        "FP8 tensors without a quantization_config: read back, logits are wrong by 1.4 (relative)",
        ("FP8 fine-grained (fp32, bf16 or ue8m0 scales)",),
        "inflated to bfloat16",
        "inflated, rewritten",
    ),
    "AutoFP8, vLLM's FP8": Stock(
        "scales are reported as unexpected, then the load fails on a dtype",
        "as in memory",
        "-",
        ("AutoFP8, vLLM",),
        "fails",
        "fails",
    ),
    "fbgemm_fp8": Stock(
        "refused: needs a GPU or an XPU",
        "refused",
        "-",
        ("fbgemm_fp8",),
        "refused",
        "refused",
    ),
    "compressed-tensors": Stock(
        "packed until the first forward, which decompresses the whole model to bfloat16 (float-quantized and "
        "pack-quantized; the others by the sources)",
        "loads; the first forward raises (`_hf_hook`)",
        "after a forward: bfloat16, labelled as compressed",
        (
            "compressed-tensors float-quantized, mxfp8-quantized",
            "compressed-tensors int-quantized, naive-quantized",
            "compressed-tensors pack-quantized",
            "NVFP4 (compressed-tensors nvfp4-pack-quantized)",
            "MXFP4 (compressed-tensors mxfp4-pack-quantized)",
        ),
        "inflated at the first forward",
        "the first forward fails",
    ),
    "GPTQ": Stock(
        "packed, with optimum and gptqmodel; its kernel repacks at the first forward; experts of Mixtral and "
        "Qwen3-MoE come out at random, with a warning",
        "packed layers stay in memory without a word; with `offload_buffers=True` the first forward is wrong "
        "by 1.4 (relative), the second raises",
        "after a forward: the kernel's layout, which does not load again",
        ("GPTQ v1 (checkpoint_format gptq)", "GPTQ v2 (gptq_v2)"),
        "packed (gptqmodel)",
        "stays in memory, silently",
    ),
    "AWQ gemm": Stock(
        "loads with gptqmodel",
        "not measured",
        "-",
        ("AWQ gemm",),
        "loads (gptqmodel)",
        "not measured",
    ),
    "AWQ gemv, gemv_fast": Stock(
        "refused by gptqmodel on a CPU",
        "not measured",
        "-",
        ("AWQ gemv", "AWQ gemv_fast, llm-awq"),
        "refused",
        "not measured",
    ),
    "bitsandbytes 4-bit": Stock(
        "packed; fused experts stay bfloat16",
        "refused; with `llm_int8_enable_fp32_cpu_offload=True` these layers are loaded as floats",
        "before a forward exact; after one, wrong by 0.5 (relative)",
        ("bitsandbytes nf4", "bitsandbytes fp4", "bitsandbytes nf4, double-quantized"),
        "packed",
        "refused",
    ),
    "bitsandbytes 8-bit": Stock(
        "not measured",
        "refused, as 4-bit (read in the sources)",
        "-",
        ("bitsandbytes int8",),
        "not measured",
        "refused",
    ),
    "torchao int8": Stock(
        "packed (int4 needs mslk)",
        "refused for what is quantized already",
        "exact",
        ("torchao int8, intx",),
        "packed",
        "refused",
    ),
    "torchao float8": Stock(
        "not measured",
        "refused, as int8 (read in the sources)",
        "-",
        ("torchao float8 (e4m3, e5m2)",),
        "not measured",
        "refused",
    ),
    "optimum-quanto": Stock(
        "files of quanto's own class, whose config names no quantization: not measured without it",
        "refused",
        "refused: not serializable",
        ("optimum-quanto qint4, qint2", "optimum-quanto qint8, qfloat8"),
        "not measured",
        "refused",
    ),
    "HQQ": Stock(
        "refused: not implemented in this version",
        "refused",
        "-",
        ("HQQ (8, 4, 3, 2, 1 bits)",),
        "refused",
        "refused",
    ),
    "ModelOpt": Stock(
        "the method is unknown: a warning, packed tensors are left out, weights are random",
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
    "ModelOpt int8": Stock(
        "the method is unknown: a warning, codes are taken for weights, scales are left out",
        "the load fails",
        "-",
        ("ModelOpt W8A8 SmoothQuant", "ModelOpt W8A8, W8A16 (not smoothed)"),
        "codes for weights, a warning",
        "fails",
    ),
    "ModelOpt's experts of gpt-oss": Stock(
        "the method is unknown: a warning; FP8: codes are taken for weights, scales are left out; NVFP4: the "
        "load fails",
        "the load fails",
        "-",
        ("ModelOpt FP8, NVFP4 experts of gpt-oss, Llama 4",),
        "codes for weights, or fails",
        "fails",
    ),
    "gpt-oss MXFP4": Stock(
        "dequantized to bfloat16 where triton and kernels are missing",
        "not measured",
        "-",
        ("MXFP4 experts of gpt-oss",),
        "inflated to bfloat16",
        "not measured",
    ),
}
"""{method: what is known of it}. Dialects that are named nowhere here were not measured."""
