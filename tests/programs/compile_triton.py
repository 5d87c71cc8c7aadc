"""Compiles Triton kernels for GPUs that are not there, down to machine code.

Prints a line for each kernel: ((format, architecture, kernel), counts).
"""

from dataclasses import asdict

import torch

from benchmarks.gpu.machine_code import compile_launch, make_launches
from hfq.formats.awq import Awq
from hfq.formats.bitsandbytes import Bnb4Bit
from hfq.formats.compressed_tensors import PackQuantized
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.formats.mxfp4 import Mxfp4
from hfq.formats.nvfp4 import Nvfp4

SIZE = 4096
FORMATS = {
    "gptq4": Gptq(4, 128, zero_reading="word_plus_one"),
    "int4 in rows": PackQuantized(4, scale_shape=(SIZE, SIZE // 128), width=SIZE // 8).sized(SIZE, SIZE),
    "mxfp4": Mxfp4(),
    "nvfp4": Nvfp4(),
    "fp8": Fp8(strategy="block", block_structure=(128, 128)),
    "awq": Awq(group_size=128),
    "nf4": Bnb4Bit(blocks=SIZE * SIZE // 64).sized(SIZE, SIZE),
}
VARIANTS = [
    *((name, 90, 1) for name in FORMATS),
    *((name, 90, 16) for name in FORMATS),
    ("gptq4", 86, 64),
    ("nf4", 86, 16),
    ("mxfp4", 80, 16),
    ("fp8", 120, 16),
    ("int4 in rows", 120, 64),
    ("mxfp4", "gfx942", 16),
]


def main() -> None:
    for name, architecture, rows in VARIANTS:
        for launch, arguments in make_launches(FORMATS[name], SIZE, SIZE, rows, torch.bfloat16):
            counts = asdict(compile_launch(launch, arguments, architecture))
            print(((name, architecture, launch.kernel.__name__), counts))


if __name__ == "__main__":
    main()
