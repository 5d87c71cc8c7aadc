"""`python -m benchmarks kernels`: products with quantized weights on a CPU.

They are compared with torch's products with bfloat16 weights and with the memory's bandwidth. Everything runs
in one process, in turns within a round. Ratios are computed within a round, and their medians are reported.
For few rows, a buffer larger than the caches is read in between, because a model's next layer is not in the
caches either. Quantized tensors are aligned to 8 bytes as in most files, and not to a cache line.

After such a read, Python's own code is not in the caches either. The products of one token are therefore also
measured without it: one row times as many layers, one after another, as fill that buffer. The layers are
contiguous in memory and are compared with a plain read of the same memory. Read rates differ between buffers
of one process, depending on their physical pages.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.kernels.kernel_columns import (
    DENSE,
    HALF,
    HALVES,
    IN_TURN,
    OF_HALVES,
    READ,
    READ_IN_TURN,
    ROUNDED,
    SAME,
    WIDE,
)
from benchmarks.kernels.kernel_peers import Call, make_peers
from benchmarks.kernels.kernels_report import report
from benchmarks.records import Record, rotated
from hfq.formats import ActivationScheme, Format
from hfq.formats.awq import Awq
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.formats.compressed_tensors import IntQuantized
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.formats.mxfp4 import Mxfp4
from hfq.formats.nvfp4 import Nvfp4
from hfq.kernels.layer_tensors import LayerTensors
from hfq.kernels.registry import KERNELS, Kernel, explain_kernels
from hfq.tables import Report

__all__ = ["FORMATS", "ROWS", "SHAPES", "bench_kernels", "measure_shape", "random_layer"]

SHAPES = {
    "7B attention": (4096, 4096),
    "7B gate": (11008, 4096),
    "7B down": (4096, 11008),
    "MoE expert": (768, 2048),
}
"""(out_features, in_features)."""

ROWS = (1, 8, 128, 512)
SCHEME = ActivationScheme("token", dtype="int8")
"""Scheme of the weights whose kernel also rounds activations."""

FORMATS: dict[str, Format] = {
    "fp8 128x128": Fp8(strategy="block", block_structure=(128, 128)),
    "fp8 channel": Fp8(strategy="channel"),
    "gptq4 g128": Gptq(4, 128, False, "stored"),
    "gptq4 g128 act-order": Gptq(4, 128, False, "stored", g_idx_length=-1, act_order=True),
    "gptq3 g128": Gptq(3, 128, False, "stored"),
    "gptq2 g128": Gptq(2, 128, False, "stored"),
    "gptq8 g128": Gptq(8, 128, False, "stored"),
    "awq g128": Awq(group_size=128),
    "awq gemv g128": Awq(version="gemv", group_size=128),
    "mxfp4": Mxfp4(scale_dtype="F8_E8M0"),
    "nvfp4": Nvfp4(),
    "int8 tensor": IntQuantized(codes_dtype="I8", scale_shape=(1,)),
    ROUNDED: IntQuantized(codes_dtype="I8", scale_shape=(-1, 1)),
}
FLUSH_NBYTES = 128 << 20
LINE_NBYTES = 64
FLUSHED_ROWS = 16
REFERENCE_ROWS = 16
"""Most rows for the reference kernel, which dequantizes the weight again in each call."""

SLOW_SECONDS = 0.5
"""Slower methods are measured in the first three rounds only."""


@dataclass(frozen=True)
class Method:
    """One way to multiply: the bytes of the weight, and the call."""

    name: str
    weights: str
    nbytes: int
    run: Callable[[], object]


def bench_kernels(
    shapes: Sequence[str],
    rows: Sequence[int],
    rounds: int,
    threads: Sequence[int],
    say: Callable[[str], None],
) -> Report:
    """Runs the benchmark.

    Args:
        shapes: Names of `SHAPES`.
        rows: Numbers of activation rows.
        rounds: Number of interleaved rounds.
        threads: Numbers of threads to measure with.
        say: Function that receives progress lines.
    """
    before, records = torch.get_num_threads(), []
    try:
        for count in threads:
            torch.set_num_threads(count)
            for shape in shapes:
                say(f"{shape}, {count} threads")
                records += [
                    record | {"threads": count}
                    for record in measure_shape(shape, SHAPES[shape], rows, rounds)
                ]
    finally:
        torch.set_num_threads(before)
    return report(records, rounds)


def measure_shape(name: str, shape: tuple[int, int], rows: Sequence[int], rounds: int) -> list[Record]:
    """Measures every method on one shape. Returns a record per method, number of rows, and round."""
    out_features, in_features = shape
    layers = {
        weights: as_in_a_file(random_layer(weight_format, *shape))
        for weights, weight_format in FORMATS.items()
    }
    dense = torch.randn(out_features, in_features).to(torch.bfloat16)
    wide, half, flush = dense.to(torch.float32), dense.to(torch.float16), torch.zeros(FLUSH_NBYTES // 4)
    peers = make_peers(dense)
    records: list[Record] = []
    for count in rows:
        activations = torch.randn(count, in_features).to(torch.bfloat16)
        methods = [
            *_methods(activations, dense, wide, layers, peers),
            *_of_halves(activations, half, layers),
            *(_in_turn(activations, dense, layers) if count == 1 else ()),
            Method(READ, "-", FLUSH_NBYTES, flush.sum),
        ]
        for record in _measure(methods, rounds, flush if count <= FLUSHED_ROWS else None):
            records.append(record | {"shape": name, "rows": count})
    return records


def random_layer(weight_format: Format, out_features: int, in_features: int) -> dict[str, torch.Tensor]:
    """Returns random codes and small scales, which multiply as fast as a quantized real weight.

    Floats are distributed like a weight's. Few of them are subnormal, which some processors handle slowly.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for spec in weight_format.tensor_specs(in_features, out_features):
        dtype = torch_dtype(spec.dtypes[0])
        if spec.role in ("codes", "zero_point"):
            if dtype.is_floating_point:
                tensors[spec.name] = (
                    (torch.randn(spec.shape, generator=generator) * 100).clamp(-448, 448).to(dtype)
                )
                continue
            shape = (*spec.shape[:-1], spec.shape[-1] * dtype.itemsize)
            tensors[spec.name] = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(
                dtype
            )
        elif spec.role == "scale" and dtype.itemsize == 1:  # E4M3 or powers of two, up to one
            low, high = (48, 57) if spec.dtypes[0] == "F8_E4M3" else (118, 128)
            tensors[spec.name] = torch.randint(
                low, high, spec.shape, generator=generator, dtype=torch.uint8
            ).view(dtype)
        elif spec.role == "index":
            order = torch.randperm(in_features, generator=generator)
            tensors[spec.name] = (order % (spec.bound or 1)).to(torch.int32)
        elif spec.role == "scale":
            tensors[spec.name] = (torch.rand(spec.shape, generator=generator) * 0.01).to(dtype)
    return tensors


def as_in_a_file(tensors: Mapping[str, torch.Tensor]) -> LayerTensors:
    """Returns copies that start 8 bytes after the start of a cache line."""
    (placed,), _ = in_one_file(tensors, 1)
    return placed


def in_one_file(tensors: Mapping[str, torch.Tensor], count: int) -> tuple[list[LayerTensors], torch.Tensor]:
    """Returns contiguous copies of a layer, and their memory.

    Each tensor starts 8 bytes after the start of a cache line. The memory is uint8, a multiple of 8 bytes.
    """
    spans = [-(-tensor.nbytes // LINE_NBYTES) * LINE_NBYTES for tensor in tensors.values()]
    room = torch.zeros(count * sum(spans) + LINE_NBYTES, dtype=torch.uint8)
    first = start = (8 - room.data_ptr()) % LINE_NBYTES
    each = []
    for _ in range(count):
        placed = LayerTensors()
        for (name, tensor), span in zip(tensors.items(), spans, strict=True):
            placed[name] = (
                room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            )
            start += span
        each.append(placed)
    return each, room[first:start]


def _methods(
    activations: torch.Tensor,
    dense: torch.Tensor,
    wide: torch.Tensor,
    layers: Mapping[str, Mapping[str, torch.Tensor]],
    peers: Mapping[tuple[str, str], tuple[int, Call]],
) -> list[Method]:
    linear, widened = torch.nn.functional.linear, activations.to(torch.float32)
    methods = [
        Method(DENSE, "bf16", dense.nbytes, lambda: linear(activations, dense)),
        Method(WIDE, "f32", wide.nbytes, lambda: linear(widened, wide)),
    ]
    for weights, tensors in layers.items():
        weight_format, nbytes = FORMATS[weights], sum(tensor.nbytes for tensor in tensors.values())
        for kernel in KERNELS.values():
            if kernel is KERNELS["reference"] and activations.shape[0] > REFERENCE_ROWS:
                continue
            scheme = (SCHEME,) if weights == ROUNDED else ()
            if kernel.rounds == bool(scheme) and _is_readable(kernel, weight_format, dense, *scheme):
                run = functools.partial(kernel.linear, activations, tensors, weight_format, *scheme)
                methods.append(Method(kernel.name, weights, nbytes, run))
    others = [
        Method(tool, weights, nbytes, functools.partial(call, activations))
        for (tool, weights), (nbytes, call) in peers.items()
    ]
    return methods + others


def _of_halves(
    activations: torch.Tensor, dense: torch.Tensor, layers: Mapping[str, Mapping[str, torch.Tensor]]
) -> list[Method]:
    given, kernel = activations.to(torch.float16), KERNELS["cpp"]
    methods = [Method(HALF, "f16", dense.nbytes, lambda: torch.nn.functional.linear(given, dense))]
    for weights in HALVES:
        if _is_readable(kernel, FORMATS[weights], dense):
            tensors = layers[weights]
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            methods.append(
                Method(
                    OF_HALVES,
                    weights,
                    nbytes,
                    functools.partial(kernel.linear, given, tensors, FORMATS[weights]),
                )
            )
    return methods


def _in_turn(
    activations: torch.Tensor, dense: torch.Tensor, layers: Mapping[str, Mapping[str, torch.Tensor]]
) -> Iterator[Method]:
    kernel = KERNELS["cpp"]
    for weights in READ_IN_TURN:
        if _is_readable(kernel, FORMATS[weights], dense):
            nbytes = sum(tensor.nbytes for tensor in layers[weights].values())
            each, memory = in_one_file(layers[weights], -(-FLUSH_NBYTES // nbytes))
            run = functools.partial(_multiply_each, kernel, activations, each, FORMATS[weights])
            yield Method(IN_TURN, weights, nbytes * len(each), run)
            yield Method(SAME, weights, memory.nbytes, memory.view(torch.int64).sum)


def _multiply_each(
    kernel: Kernel,
    activations: torch.Tensor,
    layers: Sequence[Mapping[str, torch.Tensor]],
    weight_format: Format,
) -> None:
    for tensors in layers:
        kernel.linear(activations, tensors, weight_format)


def _is_readable(
    kernel: Kernel, weight_format: Format, dense: torch.Tensor, scheme: ActivationScheme | None = None
) -> bool:
    out_features, in_features = dense.shape
    reasons = explain_kernels(kernel.name, weight_format, in_features, out_features, scheme=scheme)
    return reasons[kernel.name] is None


def _measure(methods: Sequence[Method], rounds: int, flush: torch.Tensor | None) -> list[Record]:
    by_key = {f"{method.weights}: {method.name}": method for method in methods}
    slowest: dict[str, float] = {}
    for key, method in by_key.items():  # the first call fills caches
        started = time.perf_counter()
        method.run()
        slowest[key] = time.perf_counter() - started
    records = []
    for number in range(rounds):
        for key in rotated(list(by_key), number):
            if number >= 3 and slowest[key] > SLOW_SECONDS:
                continue
            if flush is not None:
                # read, like a model's other layers: written data would go to memory during the call
                flush.sum()
            method, started = by_key[key], time.perf_counter()
            method.run()
            seconds = time.perf_counter() - started
            records.append(
                {
                    "method": method.name,
                    "weights": method.weights,
                    "nbytes": method.nbytes,
                    "round": number,
                    "seconds": seconds,
                }
            )
    return records
