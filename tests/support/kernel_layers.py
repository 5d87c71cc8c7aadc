"""Layers in every layout of the compiled kernel, with odd sizes if the layout allows them."""

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hfq.checkpoint.gguf.block_types import block_type
from hfq.formats import Format
from hfq.formats.awq import Awq
from hfq.formats.bitsandbytes import Bnb4Bit, BnbInt8
from hfq.formats.compressed_tensors import IntQuantized, PackQuantized
from hfq.formats.fp8 import Fp8
from hfq.formats.gguf.block_rows import Gguf
from hfq.formats.gpt_oss import GptOssMxfp4
from hfq.formats.gptq import Gptq
from hfq.formats.mlx.affine import Mlx
from hfq.formats.mlx.float_modes import MlxFp4, MlxFp8
from hfq.formats.mxfp4 import Mxfp4
from hfq.formats.nvfp4 import Nvfp4
from hfq.formats.quanto import QuantoBytes
from hfq.kernels.cpp.expert_products import ExpertProducts
from hfq.tensor_spec import Blocks, StoredOrder
from tests.support.gguf_files import random_blocks

GPTQ_IN = 352  # no multiple of 64, and of 128 only if a layout needs it


@dataclass(frozen=True)
class Case:
    """A format and the size of its layer.

    `scatter` shuffles the groups over the input channels; `uneven` makes some groups larger than others.
    """

    format: Format
    in_features: int
    out_features: int
    scatter: bool = False
    uneven: bool = False
    dtype: torch.dtype | None = field(default=None)  # dtype of the scales, if not the format's own

    def make(self):
        """Returns (the resolved format, tensors with random codes)."""
        generator = torch.Generator().manual_seed(3)
        weight = torch.randn(self.out_features, self.in_features, generator=generator) * 0.1 + 0.03
        tensors = self.format.quantize(weight)
        if self.scatter:
            name = next(name for name in tensors if name.endswith("g_idx"))
            tensors[name] = tensors[name][torch.randperm(self.in_features, generator=generator)]
        if self.uneven:
            tensors["g_idx"][:5] = tensors["g_idx"][5]
        if self.dtype is not None:
            tensors["scales"] = tensors["scales"].to(self.dtype)
        return self.format.resolve("m", tensors), tensors


@dataclass(frozen=True)
class BlockCase(Case):
    """A layer of ggml's blocks, with random bytes as codes."""

    def make(self):
        kind = self.format.type
        scale = 0.01 if kind.size == 32 else 0.0003  # of scales of up to 63
        raw = random_blocks(kind.name, self.out_features * self.in_features // kind.size, scale=scale)
        return self.format, {"weight": torch.from_numpy(raw).view(self.out_features, -1)}


def blocks(name: str, out_features: int = 37, **orders) -> BlockCase:
    in_features = 352 if block_type(name).size == 32 else 768
    return BlockCase(Gguf(Blocks(name, is_layer=True, **orders)), in_features, out_features)


def gptq(
    bits: int,
    group_size: int,
    reading: str = "stored",
    symmetric: bool = False,
    out_features: int = 96,
    **options,
) -> Case:
    return Case(
        Gptq(bits, group_size, symmetric, reading, g_idx_length=GPTQ_IN), GPTQ_IN, out_features, **options
    )


def packed(
    in_features: int, out_features: int, groups: int, scatter: bool = False, bits: int = 4, **options
) -> Case:
    width = -(-in_features * bits // 32)
    layout = PackQuantized(bits, scale_shape=(out_features, groups), width=width, **options)
    return Case(layout.sized(in_features, out_features), in_features, out_features, scatter)


def bnb(in_features: int, out_features: int, blocksize: int, **options) -> Case:
    layout = Bnb4Bit(blocks=in_features * out_features // blocksize, state_nbytes=1, **options).sized(
        in_features, out_features
    )
    return Case(layout, in_features, out_features)


def fp8(in_features: int, out_features: int, **options) -> Case:
    return Case(Fp8(**options), in_features, out_features)


CASES = {
    "w4 g32": gptq(4, 32),
    "w4 g32 v1": gptq(4, 32, "word_plus_one"),
    "w4 g32 autogptq": gptq(4, 32, "field_plus_one"),
    "w4 g32 sym masked": gptq(4, 32, "masked_plus_one", True),
    "w4 channel, 40 outputs, bf16 scales": gptq(4, -1, out_features=40, dtype=torch.bfloat16),
    "w4 groups of 88": gptq(4, 88),
    "w4 groups that end within a word": gptq(4, 44, out_features=40),
    "w4 act-order": gptq(4, 32, scatter=True, out_features=40),
    "w4 act-order, uneven groups": gptq(4, 32, scatter=True, uneven=True),
    "w8 g32": gptq(8, 32),
    "w8 g32 v1, 20 outputs": gptq(8, 32, "word_plus_one", out_features=20),
    "w8 act-order": gptq(8, 32, scatter=True),
    "w3 g32": gptq(3, 32),
    "w3 channel masked": gptq(3, -1, "masked_plus_one"),
    "w3 act-order, f32 scales": gptq(3, 32, scatter=True, dtype=torch.float32),
    "w2 g32": gptq(2, 32),
    "w2 groups of 16 v1": gptq(2, 16, "word_plus_one", out_features=48),
    "w2 act-order": gptq(2, 32, scatter=True),
    "awq g32": Case(Awq(group_size=32), 352, 96),
    "awq channel, 40 outputs": Case(Awq(group_size=-1), 331, 40),
    "awq groups of 11, f32 scales": Case(Awq(group_size=11), 352, 104, dtype=torch.float32),
    "mxfp4": Case(Mxfp4(), 352, 37),
    "mxint4, e8m0": Case(Mxfp4(is_integer=True, scale_dtype="F8_E8M0"), 96, 33),
    "pack-quantized g32": Case(PackQuantized(4, scale_shape=(37, 11), width=44).sized(352, 37), 352, 37),
    "pack-quantized groups of 26": Case(PackQuantized(4, scale_shape=(5, 3), width=10).sized(78, 5), 78, 5),
    "pack-quantized channel, 301 inputs": Case(
        PackQuantized(4, scale_shape=(37, 1), width=38).sized(301, 37), 301, 37
    ),
    "pack-quantized tensor": Case(PackQuantized(4, scale_shape=(1,), width=44).sized(352, 1), 352, 1),
    "pack-quantized g32 asym": packed(352, 37, 11, is_symmetric=False),
    "pack-quantized g64 asym": packed(320, 37, 5, is_symmetric=False),
    "pack-quantized groups of 26 asym": packed(78, 5, 3, is_symmetric=False),
    "pack-quantized channel asym, 301 inputs": packed(301, 37, 1, is_symmetric=False),
    "pack-quantized act-order": packed(352, 37, 11, has_g_idx=True, scatter=True),
    "pack-quantized act-order asym": packed(352, 37, 11, has_g_idx=True, is_symmetric=False, scatter=True),
    "pack-quantized w8 g32": packed(352, 37, 11, bits=8),
    "pack-quantized w8 channel, 301 inputs": packed(301, 37, 1, bits=8),
    "pack-quantized w8 groups of 26, signed zero points": packed(
        78, 5, 3, bits=8, is_symmetric=False, zero_dtype="I8"
    ),
    "pack-quantized w8 act-order": packed(352, 37, 11, bits=8, has_g_idx=True, scatter=True),
    "pack-quantized w8 g32 asym": packed(352, 37, 11, bits=8, is_symmetric=False),
    "pack-quantized w8 groups of 26 asym": packed(78, 5, 3, bits=8, is_symmetric=False),
    "pack-quantized w8 channel asym, 301 inputs": packed(301, 37, 1, bits=8, is_symmetric=False),
    "pack-quantized w8 act-order asym": packed(
        352, 37, 11, bits=8, has_g_idx=True, is_symmetric=False, scatter=True
    ),
    "gpt-oss": Case(GptOssMxfp4(), 352, 37),
    "nvfp4": Case(Nvfp4(), 336, 37),
    "nvfp4 modelopt": Case(Nvfp4(stored_codes_name="weight", group_size=32), 352, 37),
    "mlx g32": Case(Mlx(4, 32), 352, 37),
    "mlx g64, bf16 scales": Case(Mlx(4, 64), 320, 37, dtype=torch.bfloat16),
    "mlx w8 g32": Case(Mlx(8, 32), 352, 37),
    "mlx w8 g64, bf16 scales": Case(Mlx(8, 64), 320, 37, dtype=torch.bfloat16),
    "mlx w8 groups of 44": Case(Mlx(8, 44), 352, 5),
    "mxfp4 of mlx": Case(MlxFp4(), 352, 37),
    "nvfp4 of mlx": Case(MlxFp4(mode="nvfp4"), 336, 37),
    "mxfp8 of mlx": Case(MlxFp8(), 352, 37),
    "awq gemv g32": Case(Awq(version="gemv", group_size=32), 352, 37),
    "awq gemv g128": Case(Awq(version="gemv", group_size=128), 384, 37),
    "awq gemv g64": Case(Awq(version="gemv", group_size=64), 320, 37),
    "awq gemv channel": Case(Awq(version="gemv", group_size=-1), 72, 5),
    "awq gemv_fast g64": Case(Awq(version="gemv_fast", group_size=64), 320, 36),
    "awq gemv_fast channel": Case(Awq(version="gemv_fast", group_size=-1), 192, 36),
    "nf4": bnb(320, 37, 64),
    "nf4 double-quantized": bnb(384, 37, 128, is_nested=True),
    "fp4 in blocks of 32, stored as bf16": bnb(352, 37, 32, quant_type="fp4", storage="BF16"),
    "int8 channel": Case(IntQuantized(codes_dtype="I8", scale_shape=(37, 1)), 301, 37),
    "int8 groups asym": Case(IntQuantized(codes_dtype="I8", scale_shape=(37, 11), zero_dtype="I8"), 352, 37),
    "int8 tensor": Case(IntQuantized(codes_dtype="I8", scale_shape=(1,)), 301, 37),
    "int8 of bitsandbytes": Case(BnbInt8(scale_shape=(37,)), 301, 37),
    "e4m3 of quanto": Case(QuantoBytes(codes_dtype="F8_E4M3", scale_shape=(37, 1)), 301, 37),
    **{
        f"ggml {name}": blocks(name)
        for name in (
            "Q4_0",
            "Q4_1",
            "Q5_0",
            "Q5_1",
            "Q8_0",
            "Q4_K",
            "Q5_K",
            "Q6_K",
            "IQ4_NL",
            "IQ4_XS",
            "MXFP4",
        )
    },
    "ggml Q4_K, rows in another order": blocks("Q4_K", 40, rows=StoredOrder(4, 3, 2, 3, 2)),
    "ggml Q8_0, rows in another order": blocks("Q8_0", 24, rows=StoredOrder(0, 1, 2, 12, 1)),
    "fp8 blocks": fp8(300, 201, strategy="block", block_structure=(128, 128)),
    "fp8 blocks of 48x80": fp8(300, 101, strategy="block", block_structure=(48, 80)),
    "fp8 blocks of 7x9": fp8(61, 33, strategy="block", block_structure=(7, 9)),
    "fp8 blocks of powers of two": fp8(
        260, 37, strategy="block", block_structure=(128, 128), scale_dtype="F8_E8M0"
    ),
    "fp8 channel": fp8(257, 37, strategy="channel"),
    "fp8 channel reciprocal": fp8(
        257, 37, strategy="channel", reciprocal=True, scale_name="weight_scale_inv"
    ),
    "fp8 tensor": fp8(64, 1, strategy="tensor", scale_shape=()),
    "fp8 groups of 32, u8": fp8(320, 37, strategy="group", group_size=32, scale_dtype="U8"),
    "fp8 e5m2": fp8(300, 37, codes_dtype="F8_E5M2", strategy="channel"),
    "fp8 e5m2 blocks": fp8(300, 37, codes_dtype="F8_E5M2", strategy="block", block_structure=(16, 48)),
}


def misplaced(tensors: Mapping[str, torch.Tensor], shift: int) -> dict[str, torch.Tensor]:
    """Returns the same tensors at a byte offset from a multiple of 64, possibly unaligned to their elements."""
    moved = {}
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        memory = (ctypes.c_char * (nbytes + 128))()
        start = -ctypes.addressof(memory) % 64 + shift
        ctypes.memmove(ctypes.addressof(memory) + start, tensor.data_ptr(), nbytes)
        moved[name] = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(
            tensor.shape
        )
    return moved


def at_the_end_of_a_page(tensor: torch.Tensor, left: int = 0) -> torch.Tensor:
    """Returns the same tensor in read-only pages, `left` bytes before a page that must not be read."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    size = -(-(len(data) + left) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory, start = mmap.mmap(-1, size + mmap.PAGESIZE), size - left - len(data)
    memory[start : start + len(data)] = data
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for place, nbytes, allowed in ((0, size, mmap.PROT_READ), (size, mmap.PAGESIZE, 0)):
        if ctypes.CDLL(None, use_errno=True).mprotect(
            ctypes.c_void_p(address + place), ctypes.c_size_t(nbytes), allowed
        ):
            raise OSError(ctypes.get_errno(), "mprotect")
    return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start).view(tensor.shape)


def multiply_together(
    activations: torch.Tensor, counts: Sequence[int], layers: Sequence[tuple[Mapping, Format]]
) -> torch.Tensor | None:
    """Returns the products of rows, sorted by layer, by layers that are taken for a projection of experts.

    None if the library declines.
    """
    tensors, weight_format = layers[0]
    outputs, inputs = weight_format.shape(tensors)
    own, found = Fp8(strategy="channel"), []
    down = [(own.quantize(torch.ones(inputs, outputs)), own)] * len(layers)
    index = torch.arange(len(layers)).repeat_interleave(torch.tensor(counts))[:, None]

    def gate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        found.extend(part.clone() for part in parts)
        return parts[0]

    products = ExpertProducts([layers], down, is_joined=True, is_kept=False)
    if products.reason is None:
        products(activations, index, torch.ones(len(index), 1), gate, 0)
    return found[0] if found else None
