"""`hfq calibrate`: the rates that `hfq plan` predicts with, measured on this machine in less than a minute.

Products run over copies of a layer that do not fit the caches together, as the layers of a model do not. What a layer and a load cost
beside their bytes is taken from tiny models of two depths: the difference is the cost of a layer.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from hfq.benchmarks.limits import drop_cache, read_files
from hfq.benchmarks.machine import machine_facts
from hfq.benchmarks.models import Architecture, make_checkpoint
from hfq.errors import SetupError
from hfq.formats import Format
from hfq.formats.awq import Awq
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.integrations.planning import kind_of_weight
from hfq.kernels.table import choose_kernel
from hfq.placement.profile import Profile

__all__ = ["calibrate", "measure_product"]

ROWS = (1, 4, 16)
_SIZE = 2048
_LAYER_NBYTES = 96 << 20
_FILE_NBYTES = 1 << 30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def calibrate(folder: Path, say: Callable[[str], None], formats: Iterable[Format] = (), quick: bool = False) -> Profile:
    """Measures this machine.

    Args:
        folder: On the disk that checkpoints rest on; a file of 1 GiB is written there and removed.
        say: Is told what is going on.
        formats: Formats whose products are measured beside the usual ones.
        quick: Small sizes: checks that it works, measures nothing.

    Raises:
        SetupError: The folder cannot be written to.
    """
    size, nbytes = (128, 4 << 20) if quick else (_SIZE, _FILE_NBYTES)
    say("disk")
    disk, cached = _measure_disk(folder, nbytes)
    say("memory")
    memory = _read_rate(4 << 20 if quick else 256 << 20)
    products: dict[str, dict[int, float]] = {}
    usual = [Fp8(strategy="block", block_structure=(128, 128)), *(Gptq(bits, 128, False, "stored") for bits in (4, 8)), Awq()]
    for name, dtype in _DTYPES.items():
        say(f"products with {name} activations")
        products[f"dense {name}"] = {rows: _dense_rate(rows, dtype, size) for rows in ROWS}
        for weight_format in [*usual, *formats]:
            kind = kind_of_weight(weight_format, name)
            products[kind] = {rows: measure_product(weight_format, rows, dtype, size) for rows in ROWS}
    say("layers and loads")
    layer, load = _measure_layers((1, 2) if quick else (4, 24))
    facts = machine_facts(folder) | {"threads": str(torch.get_num_threads())}
    return Profile("measured", disk, cached, memory, _link_rate(), products, layer, load, facts)


def measure_product(weight_format: Format, rows: int, dtype: torch.dtype, size: int = _SIZE) -> float:
    """Weights per second of a product with packed weights [size, size], the best of three passes over cold copies.

    Args:
        weight_format: The format of the weights.
        rows: Rows of activations.
        dtype: Their dtype.
        size: Inputs and outputs of a layer.
    """
    tensors = weight_format.quantize(torch.randn(size, size, generator=torch.Generator().manual_seed(0)) * 0.02)
    kernel = choose_kernel("auto", weight_format, size, size)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    copies = [{name: tensor.clone() for name, tensor in tensors.items()} for _ in range(_copies(nbytes, size))]
    activations = torch.randn(rows, size).to(dtype)
    return _rate(lambda layer: kernel.linear(activations, layer, weight_format), copies, size * size)


def _dense_rate(rows: int, dtype: torch.dtype, size: int) -> float:
    weight = torch.randn(size, size).to(dtype)
    copies = [weight.clone() for _ in range(_copies(weight.nbytes, size))]
    activations = torch.randn(rows, size).to(dtype)
    return _rate(lambda layer: torch.nn.functional.linear(activations, layer), copies, weight.numel())


def _copies(nbytes: int, size: int) -> int:
    return max(2, min(_LAYER_NBYTES // nbytes, 24)) if size == _SIZE else 2


def _rate(run: Callable[[Any], object], layers: list, weights: int) -> float:
    run(layers[0])
    best = float("inf")
    with torch.inference_mode():
        for _ in range(3):
            started = time.perf_counter()
            for layer in layers:
                run(layer)
            best = min(best, time.perf_counter() - started)
    return weights * len(layers) / best


def _read_rate(nbytes: int) -> float:
    """Bytes per second at which memory is read, by a sum over float32."""
    values = torch.zeros(nbytes // 4)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        values.sum()
        best = min(best, time.perf_counter() - started)
    return nbytes / best


def _measure_disk(folder: Path, nbytes: int) -> tuple[float, float]:
    """Bytes per second of a cold file, past the page cache where that is possible; and of a file in the page cache."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=".hfq-calibrate-")
    except OSError as error:
        raise SetupError(
            "The disk cannot be measured.", file=folder, expected="a folder that can be written to", found=error,
            fix="pass --folder on the disk that your checkpoints rest on",
        ) from error  # fmt: skip
    file = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            block = os.urandom(16 << 20)
            for start in range(0, nbytes, len(block)):
                stream.write(block[: nbytes - start])
        drop_cache([file])
        seconds = read_files([file], direct=True, threads=8) or _cold(file)
        read_files([file], direct=False)
        cached = min(_buffered(file) for _ in range(3))
        return nbytes / seconds, nbytes / cached
    finally:
        file.unlink()


def _cold(file: Path) -> float:
    drop_cache([file])
    return _buffered(file)


def _buffered(file: Path) -> float:
    return read_files([file], direct=False) or float("inf")


def _link_rate() -> float | None:
    """Bytes per second of a copy from pinned memory to the first accelerator; None where there is none."""
    if not torch.cuda.is_available():
        return None
    source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return source.nbytes / best


def _measure_layers(depths: tuple[int, int]) -> tuple[float, tuple[float, float]]:
    """(seconds of a layer's forward beside its products, (seconds of a load, and of each of its layers))."""
    forwards: dict[int, float] = {}
    loads: dict[int, float] = {}
    few, many = depths
    with tempfile.TemporaryDirectory() as folder:
        for layers in (few, many, few, many):
            checkpoint = make_checkpoint(Path(folder), Architecture(128, layers), "gptq4")
            load, forward = _time_model(checkpoint)
            loads[layers] = min(load, loads.get(layers, load))
            forwards[layers] = min(forward, forwards.get(layers, forward))
    per_layer, forward = (max(times[many] - times[few], 0.0) / (many - few) for times in (loads, forwards))
    return forward, (max(loads[few] - few * per_layer, 0.0), per_layer)


def _time_model(folder: Path) -> tuple[float, float]:
    """Seconds of a load, and of a step of one token."""
    from transformers import AutoModelForCausalLM

    from hfq import HfqConfig

    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=HfqConfig())
    load = time.perf_counter() - started
    tokens, seconds = torch.tensor([[1]]), []
    with torch.inference_mode():
        cache = model(torch.ones(1, 8, dtype=torch.long), use_cache=True).past_key_values
        for _ in range(8):
            started = time.perf_counter()
            cache = model(tokens, past_key_values=cache, use_cache=True).past_key_values
            seconds.append(time.perf_counter() - started)
    return load, statistics.median(seconds)
