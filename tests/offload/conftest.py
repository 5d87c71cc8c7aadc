"""A stack of small blocks on disk: each a dense norm and scale, and two packed layers of different
dialects.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hfq.checkpoint import Checkpoint, Reader, write_safetensors
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.kernels.registry import choose_kernel
from hfq.modules.flat_buffer import map_tensors, read_tensor
from hfq.modules.linear import QuantizedLinear
from hfq.offload.experts.expert_cache import ExpertCache
from hfq.offload.experts.expert_reader import gather_experts, place_nbytes
from hfq.offload.experts.places import Places
from hfq.offload.offload_buffers import OffloadBuffers
from hfq.offload.offloader import Offloader, OffloadOptions
from hfq.offload.unit import OffloadUnit, UnquantizedParameter

SIZE, MOST_LAYERS = 64, 8
FORMATS = {
    "q": Fp8(strategy="block", block_structure=(24, 40)),
    "k": Gptq(4, 32, False, "stored", g_idx_length=SIZE),
}
DENSE = ("norm.weight", "norm.bias", "scale")


class Layer(nn.Module):
    """A block; `probe` is called in the middle of its forward, `result` makes what it returns."""

    def __init__(self, linears):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(SIZE), nn.Parameter(torch.empty(SIZE))
        self.q, self.k = linears
        self.probe = lambda layer: None
        self.result = lambda layer, outputs: outputs

    def forward(self, activations, gain=1.0):
        hidden = self.q(self.norm(activations)) * self.scale
        self.probe(self)
        return self.result(self, activations + gain * torch.tanh(self.k(hidden)))


class Chain(nn.Sequential):
    """Runs its blocks in the order of `order`, where that is set."""

    order: tuple[int, ...] | None = None

    def forward(self, activations):
        for index in range(len(self)) if self.order is None else self.order:
            activations = self[index](activations)
        return activations


@dataclass
class Stack:
    """The model, its streamer (None where it is resident), and the files it came from.

    Attributes:
        nbytes: What each block needs of the file.
        quantized_nbytes: The packed part of that.
    """

    model: Chain
    reader: Reader
    offloader: Offloader | None
    nbytes: list[int]
    quantized_nbytes: list[int]

    def is_offloaded(self) -> bool:
        return all(parameter.is_meta for parameter in self.model.parameters())

    def read_nbytes(self) -> list[int]:
        """What one read of each block reads: from the start of its first page on; past the page cache, whole
        pages of the file.
        """
        found, source = [], self.offloader.source
        for layout in self.offloader.layouts:
            (run,) = layout.runs
            end = run.source.offset + run.source.nbytes
            if source.mode == "direct" and source.files.supports_direct(run.source.file):
                size = self.reader.identity(run.source.file)[1]
                end = min(-(-end // 4096) * 4096, size)
            found.append(end - run.source.offset // 4096 * 4096)
        return found

    @property
    def buffers(self) -> OffloadBuffers:
        """The offload buffers of the only device."""
        (found,) = self.offloader.buffers.values()
        return found

    def quiet(self) -> int:
        """The bytes read so far, once everything that was begun is read."""
        for index in range(len(self.offloader.units)):
            ticket = self.offloader._buffers_of(index).ticket_of(index)
            if ticket is not None:
                ticket.wait()
        return self.reader.counters.bytes_read


@dataclass
class Experts:
    """Experts on disk of two quantized layers each.

    Attributes:
        layers: The layers of each expert.
        expected: The stored tensors of each layer.
        reader: Reads their file.
        offloader: Onloads them.
    """

    layers: list[list[QuantizedLinear]]
    expected: dict[QuantizedLinear, dict[str, torch.Tensor]]
    reader: Reader
    offloader: Offloader

    @property
    def cache(self) -> ExpertCache:
        return self.offloader.experts

    def places(self) -> Places:
        """Returns the places of the host."""
        (found,) = self.cache._places.values()
        return found

    def kept(self) -> list[int]:
        """Returns the experts that have a place, the one that leaves next first."""
        places = sorted(self.places().places, key=lambda place: place.value)
        held = [place.contents.expert for place in places if place.contents is not None]
        return [self.cache.experts.index(expert) for expert in held]

    def use(self, *numbers: int, during=lambda numbers: None, ahead=None) -> list[list[int]]:
        """Onloads experts, and checks every byte of them; returns the parts in which they came.

        Args:
            numbers: The experts.
            during: Called with the experts of each part.
            ahead: The experts that are guessed for the next call; None for no guess.
        """
        parts = []

        def compute(first: int, last: int, _: object) -> None:
            parts.append([*numbers[first:last]])
            self.check(*parts[-1])
            during(parts[-1])
            self.check(*parts[-1])

        guess = None if ahead is None else (lambda: [self.layers[number] for number in ahead])
        self.cache.within([self.layers[number] for number in numbers], compute, guess)
        return parts

    def check(self, *numbers: int) -> None:
        """Checks every byte of the tensors that this thread is given."""
        for layer in (layer for number in numbers for layer in self.layers[number]):
            found = layer.onloaded_tensors()
            assert found.keys() == self.expected[layer].keys()
            for name, expected in self.expected[layer].items():
                assert torch.equal(found[name].view(torch.uint8), expected.view(torch.uint8)), layer.name

    def are_free(self) -> bool:
        """Returns True if no call uses a place, and this thread is given no tensors."""
        is_left = any(place.holders() for place in self.places().places)
        return not is_left and self.cache._onloaded() is None


def stored(tensor: torch.Tensor):
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return safetensors_dtype(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes()


@pytest.fixture(autouse=True)
def one_torch_thread():
    """The tensors are too small for more, and threads that wait for each other are slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def content(tmp_path_factory):
    """The bytes of the checkpoint."""
    file = tmp_path_factory.mktemp("stack") / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for layer in range(MOST_LAYERS):
        for local, weight_format in FORMATS.items():
            quantized = weight_format.quantize(torch.randn(SIZE, SIZE, generator=generator) * 0.1)
            tensors |= {f"{layer}.{local}.{name}": tensor for name, tensor in quantized.items()}
        tensors |= {f"{layer}.{name}": torch.rand(SIZE, generator=generator) for name in DENSE}
    write_safetensors(file, {name: stored(tensor) for name, tensor in tensors.items()})
    return file.read_bytes()


@pytest.fixture
def folder(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    return tmp_path


@pytest.fixture
def build(folder):
    """build(offload=True, dtype=torch.float32, layers=4, options=…, resident=()) → the stack, on disk or
    wholly resident.

    `resident` names packed layers, as "0.q", that rest in memory all the same.
    """

    def layer_of(checkpoint, reader, index, offload, dtype, resident) -> tuple[Layer, OffloadUnit]:
        linears = []
        for local, weight_format in FORMATS.items():
            prefix = f"{index}.{local}."
            infos = {n.removeprefix(prefix): i for n, i in checkpoint.tensors.items() if n.startswith(prefix)}
            linears.append(
                QuantizedLinear(prefix[:-1], SIZE, SIZE, weight_format, infos, choose_kernel("reference"))
            )
            if not offload or prefix[:-1] in resident:
                linears[-1].hold(map_tensors(reader, infos))
        layer, weights = Layer(linears), []
        for name in DENSE:
            owner, local = layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            info = checkpoint.tensors[f"{index}.{name}"]
            weights.append(UnquantizedParameter(owner, local, info))
            value = (
                torch.empty(SIZE, dtype=dtype, device="meta")
                if offload
                else read_tensor(reader, info).to(dtype)
            )
            owner._parameters[local] = nn.Parameter(value, requires_grad=False)
        return layer, OffloadUnit(str(index), layer, tuple(linears), tuple(weights))

    def build(
        offload: bool = True,
        dtype: torch.dtype = torch.float32,
        layers: int = 4,
        options: OffloadOptions = OffloadOptions(),  # noqa: B008
        resident: tuple[str, ...] = (),
        device: str = "cpu",
    ) -> Stack:
        checkpoint = Checkpoint.open(folder)
        reader = Reader(checkpoint)
        pairs = [layer_of(checkpoint, reader, index, offload, dtype, resident) for index in range(layers)]
        model, units = Chain(*(layer for layer, _ in pairs)), [unit for _, unit in pairs]
        quantized = [
            sum(info.nbytes for linear in unit.quantized for info in linear.infos.values()) for unit in units
        ]
        sizes = [
            size + sum(weight.info.nbytes for weight in unit.unquantized)
            for size, unit in zip(quantized, units, strict=True)
        ]
        offloader = Offloader(units, reader, device, options=options, root=model) if offload else None
        reader.counters.bytes_read = 0
        return Stack(model, reader, offloader, sizes, quantized)

    return build


@pytest.fixture
def build_experts(folder):
    """build_experts(places=3, routed=1, options=…) → eight experts on disk, and a cache of so many places."""

    def build(places: int = 3, routed: int = 1, mode: str = "buffered", threads: int = 2) -> Experts:
        checkpoint = Checkpoint.open(folder)
        reader, layers, expected = Reader(checkpoint), [], {}
        for index in range(MOST_LAYERS):
            layers.append([])
            for local, weight_format in FORMATS.items():
                prefix = f"{index}.{local}."
                infos = {
                    n.removeprefix(prefix): i for n, i in checkpoint.tensors.items() if n.startswith(prefix)
                }
                kernel = choose_kernel("reference")
                layers[-1].append(QuantizedLinear(prefix[:-1], SIZE, SIZE, weight_format, infos, kernel))
                expected[layers[-1][-1]] = {
                    name: tensor.clone() for name, tensor in map_tensors(reader, infos).items()
                }
        on_demand = [layer for own in layers for layer in own]
        for layer in on_demand:
            layer.onload_to(torch.device("cpu"))
        limit = places * place_nbytes(gather_experts(on_demand))
        options = OffloadOptions(
            mode, threads=threads, expert_caches={torch.device("cpu"): limit}, routed_experts=routed
        )
        reader.counters.bytes_read = 0
        return Experts(layers, expected, reader, Offloader([], reader, "cpu", on_demand, options))

    return build
