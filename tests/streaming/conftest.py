"""A stack of two small blocks on disk: each a dense norm and scale, and two packed layers of different dialects."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hfq.checkpoint import Checkpoint, Reader, write_safetensors
from hfq.formats.dtypes import safetensors_dtype
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.kernels.table import choose_kernel
from hfq.modules.linear import PackedLinear
from hfq.modules.row import map_row, read_tensor
from hfq.streaming.streamer import Block, DenseParameter, Streamer

SIZE = 64
FORMATS = {"q": Fp8(strategy="block", block_structure=(24, 40)), "k": Gptq(4, 32, False, "stored", g_idx_length=SIZE)}
DENSE = ("norm.weight", "norm.bias", "scale")


class Layer(nn.Module):
    """A block; `probe` is called in the middle of its forward."""

    def __init__(self, linears):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(SIZE), nn.Parameter(torch.empty(SIZE))
        self.q, self.k = linears
        self.probe = lambda layer: None

    def forward(self, activations, gain=1.0):
        hidden = self.q(self.norm(activations)) * self.scale
        self.probe(self)
        return activations + gain * torch.tanh(self.k(hidden))


@dataclass
class Stack:
    """The model, its streamer (None where it is resident), and the files it came from."""

    model: nn.Sequential
    reader: Reader
    streamer: Streamer | None
    nbytes: list[int]
    packed_nbytes: list[int]

    def is_offloaded(self) -> bool:
        return all(parameter.is_meta for parameter in self.model.parameters())


def stored(tensor: torch.Tensor):
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return safetensors_dtype(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes()


@pytest.fixture
def folder(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(2):
        for local, weight_format in FORMATS.items():
            packed = weight_format.quantize(torch.randn(SIZE, SIZE, generator=generator) * 0.1)
            tensors |= {f"{layer}.{local}.{name}": tensor for name, tensor in packed.items()}
        tensors |= {f"{layer}.{name}": torch.rand(SIZE, generator=generator) for name in DENSE}
    write_safetensors(tmp_path / "model.safetensors", {name: stored(tensor) for name, tensor in tensors.items()})
    return tmp_path


@pytest.fixture
def build(folder):
    """build(offload=True, dtype=torch.float32) → the stack, resting on disk or wholly resident."""

    def build(offload: bool = True, dtype: torch.dtype = torch.float32) -> Stack:
        checkpoint = Checkpoint.open(folder)
        reader = Reader(checkpoint)
        layers, blocks, sizes, packed_sizes = [], [], [], []
        for index in range(2):
            linears = []
            for local, weight_format in FORMATS.items():
                prefix = f"{index}.{local}."
                infos = {n.removeprefix(prefix): i for n, i in checkpoint.tensors.items() if n.startswith(prefix)}
                linears.append(PackedLinear(prefix[:-1], SIZE, SIZE, weight_format, infos, choose_kernel("reference")))
            layer = Layer(linears)
            slots = []
            for name in DENSE:
                owner, local = layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
                info = checkpoint.tensors[f"{index}.{name}"]
                slots.append(DenseParameter(owner, local, info))
                value = torch.empty(SIZE, dtype=dtype, device="meta") if offload else read_tensor(reader, info).to(dtype)
                owner._parameters[local] = nn.Parameter(value, requires_grad=False)
            if not offload:
                for linear in linears:
                    linear.hold(map_row(reader, linear.infos))
            layers.append(layer)
            blocks.append(Block(str(index), layer, tuple(linears), tuple(slots)))
            packed_sizes.append(sum(info.nbytes for linear in linears for info in linear.infos.values()))
            sizes.append(packed_sizes[-1] + sum(slot.info.nbytes for slot in slots))
        streamer = Streamer(blocks, reader, "cpu") if offload else None
        reader.counters.bytes_read = 0
        return Stack(nn.Sequential(*layers), reader, streamer, sizes, packed_sizes)

    return build
