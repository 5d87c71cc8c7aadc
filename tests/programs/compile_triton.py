"""Compiles the Triton kernels for GPUs that are not there, down to machine code; prints what it compiled. Run
by test_triton.
"""

import triton.language as tl
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hfq.kernels.cuda import triton_device

TILES = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "STEPS": 4}
FLOATS = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}


def gptq(bits: int, x: str):
    pointers = {
        "x": x,
        "qweight": "i32",
        "qzeros": "i32",
        "scales": "fp16",
        "index": "i32",
        "partial": "fp32",
    }
    options = {
        "BITS": bits,
        "READING": "masked_plus_one",
        "ONES": 0,
        "HAS_INDEX": True,
        "DTYPE": FLOATS[x],
        "DOT": FLOATS[x],
    }
    return triton_device.gptq_linear, pointers, options | TILES


def fp8(is_quantized: bool, x: str):
    pointers = {
        "x": "i8" if is_quantized else x,
        "x_scales": "fp32",
        "weight": "i8",
        "scales": "u8",
        "partial": "fp32",
    }
    options = {"IS_QUANTIZED": is_quantized, "IS_E4M3": True, "IS_POWER": True, "DIVIDES": not is_quantized}
    return triton_device.fp8_linear, pointers, options | {"DTYPE": FLOATS[x], "DOT": FLOATS[x]} | TILES


def quantize(x: str):
    options = {"HAS_BOUND": True, "BLOCK": 128, "STEPS": 1}
    return triton_device.quantize_e4m3, {"x": x, "codes": "i8", "scales": "fp32"}, options


def main() -> None:
    variants = [
        (75, gptq(4, "fp16")),
        (90, gptq(3, "bf16")),
        (90, fp8(True, "bf16")),
        (80, fp8(False, "fp32")),
        (75, quantize("fp16")),
    ]
    for capability, (kernel, pointers, options) in variants:
        types = {name: "fp32" if name == "upper_bound" else "i32" for name in kernel.arg_names}
        types |= {name: f"*{dtype}" for name, dtype in pointers.items()} | dict.fromkeys(options, "constexpr")
        constants = {(kernel.arg_names.index(name),): value for name, value in options.items()}
        made = compile_kernel(ASTSource(kernel, types, constants), target=GPUTarget("cuda", capability, 32))
        print(kernel.__name__, capability, len(made.asm["cubin"]) > 1000)


if __name__ == "__main__":
    main()
