"""One packed layer on disk, and the module that holds it either way."""

import pytest
import torch

from hfq.checkpoint import Checkpoint, Reader, write_safetensors
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.kernels.registry import choose_kernel
from hfq.modules.flat_buffer import FlatBuffer, map_tensors
from hfq.modules.linear import QuantizedLinear

IN, OUT = 96, 64
FORMATS = {
    "gptq": Gptq(4, 32, False, "stored", g_idx_length=IN),
    "fp8 block": Fp8(strategy="block", block_structure=(24, 40), scale_name="weight_scale_inv"),
    "fp8 tensor": Fp8(strategy="tensor", scale_shape=()),
}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def store(tmp_path):
    """store({local: tensor}, shift=n) → (infos by local name, reader); all tensors lie `n` bytes further on
    in the file.
    """

    def store(tensors, shift: int = 0):
        stored = {"shift": ("U8", (shift,), b"\x00" * shift)} if shift else {}
        for local, tensor in tensors.items():
            stored[f"m.{local}"] = (safetensors_dtype(tensor.dtype), tuple(tensor.shape), as_bytes(tensor))
        write_safetensors(tmp_path / "model.safetensors", stored)
        checkpoint = Checkpoint.open(tmp_path)
        return {local: checkpoint.tensors[f"m.{local}"] for local in tensors}, Reader(checkpoint)

    return store


@pytest.fixture(params=FORMATS)
def layer(request):
    """(format, tensors) of a layer 96 → 64 with a bias."""
    weight_format = FORMATS[request.param]
    generator = torch.Generator().manual_seed(0)
    tensors = weight_format.quantize(torch.randn(OUT, IN, generator=generator) * 0.1)
    return weight_format, tensors | {"bias": torch.randn(OUT, generator=generator).half()}


@pytest.fixture
def make(store, layer):
    """make(backing) → the layer as a module that holds its tensors "mapped", in an "arena", or not yet
    ("meta").
    """
    weight_format, tensors = layer
    infos, reader = store(tensors)

    def make(backing: str, scheme=None) -> QuantizedLinear:
        linear = QuantizedLinear(
            "model.layers.0.q", IN, OUT, weight_format, infos, choose_kernel("reference"), scheme
        )
        linear.reader = reader
        if backing == "mapped":
            linear.hold(map_tensors(reader, infos))
        elif backing == "arena":
            linear.hold_buffer(FlatBuffer.read(reader, infos))
        return linear

    return make
