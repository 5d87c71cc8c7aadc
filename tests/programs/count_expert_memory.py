"""Prints the bytes by which this process grew while it onloaded random experts, and the bytes of their cache."""

import random
import sys
from pathlib import Path

import torch

from hfq.checkpoint import Checkpoint, Reader
from hfq.formats.unquantized import Unquantized
from hfq.kernels.registry import choose_kernel
from hfq.modules.linear import QuantizedLinear
from hfq.offload.experts.expert_reader import gather_experts, place_nbytes
from hfq.offload.offloader import Offloader, OffloadOptions

CPU = torch.device("cpu")


def private_nbytes() -> int:
    """Returns the bytes of private memory of this process.

    They are counted page by page. RssAnon of /proc/self/status lacks what each processor has yet to report.
    """
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("Anonymous:")).split()[1]) << 10


folder, places = sys.argv[1], int(sys.argv[2])
checkpoint = Checkpoint.open(folder)
layers = []
for name, info in checkpoint.tensors.items():
    out_features, in_features = info.shape
    infos = {"weight": info}
    layers.append(
        QuantizedLinear(
            name.removesuffix(".weight"),
            in_features,
            out_features,
            Unquantized(),
            infos,
            choose_kernel("reference"),
        )
    )
    layers[-1].onload_to(CPU)
reader, size = Reader(checkpoint), place_nbytes(gather_experts(layers))


def offload(places: float) -> Offloader:
    options = OffloadOptions("direct", threads=2, expert_caches={CPU: int(places * size)}, routed_experts=1)
    return Offloader([], reader, "cpu", layers, options)


offload(1).experts.within(
    [[layer] for layer in layers], lambda *_: None
)  # what the first call imports and starts
offloader, order, most = offload(places + 0.5), random.Random(0), 0
before = private_nbytes()
for _ in range(60):
    routed = [[layers[number]] for number in sorted(order.sample(range(len(layers)), 4))]
    offloader.experts.within(routed, lambda *_: None)
    most = max(most, private_nbytes() - before)
print(most, offloader.experts.budget)
