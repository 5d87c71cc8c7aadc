"""Choice of the best format whose weights fit a memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hfq.errors import PlacementError
from hfq.formats import Format
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from hfq.placement.estimate.estimate import ModelSizes, Workload
from hfq.placement.estimate.kv_cache import activation_nbytes, kv_nbytes
from hfq.tensor_spec import DTYPE_BITS

__all__ = ["LADDER", "Shapes", "choose_format"]


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model's weights, independent of their format.

    Attributes:
        quantized: (out_features, in_features) of each layer that is quantized or could be.
        other_nbytes: Bytes of all other tensors, as loaded.
        bits: Bits per weight of this checkpoint; 16 or 32 if it is unquantized.
    """

    quantized: Sequence[tuple[int, int]]
    other_nbytes: int
    bits: float


LADDER: Mapping[str, Format | None] = {
    "bf16": None,
    "fp8, a scale for each 128×128": Fp8(strategy="block", block_structure=(128, 128)),
    "gptq int4 g128": Gptq(4, 128, False, "stored"),
    "gptq int3 g128": Gptq(3, 128, False, "stored"),
    "gptq int2 g128": Gptq(2, 128, False, "stored"),
}
"""Formats, best first; of two formats of equal size, the better one.

The loss of a format depends on the model. Measure it with `hfq.evaluate` before you rely on a format.
"""


def choose_format(shapes: Shapes, sizes: ModelSizes, workload: Workload, budget: int) -> dict:
    """Returns each format with its bytes, and the first that fits, as JSON-ready data.

    Args:
        shapes: The model's weights.
        sizes: Sizes of the KV cache and of activations.
        workload: Batch size, context length, and dtype of the KV cache.
        budget: Bytes for weights, KV cache, and activations together.

    Raises:
        PlacementError: No format fits.
    """
    adding = kv_nbytes(sizes.kv, workload.batch, workload.context, sizes.dtype, workload.kv_dtype)
    adding += activation_nbytes(sizes.activations, workload.batch, workload.context, sizes.dtype)
    rungs = []
    for name, weight_format in LADDER.items():
        weights = shapes.other_nbytes + sum(
            _layer_nbytes(weight_format, *shape) for shape in shapes.quantized
        )
        total = weights + adding
        rungs.append(
            {"name": name, "weights_nbytes": weights, "total_nbytes": total, "fits": total <= budget}
        )
    best = next((rung["name"] for rung in rungs if rung["fits"]), None)
    if best is None:
        least = min(int(rung["total_nbytes"]) for rung in rungs)  # type: ignore[call-overload]
        raise PlacementError(
            "No format fits --suggest-format.",
            expected=f"at least {least:,} B ({rungs[-1]['name']})",
            found=f"{budget:,} B",
            fix=f"Pass --suggest-format {least}B or a shorter --max-model-len, or plan a placement that "
            "offloads.",
        )
    note = (
        f"This checkpoint has {shapes.bits:.3g} bits per weight. Formats with more bits must be made from "
        "the original weights."
    )
    return {"budget_nbytes": budget, "best": best, "rungs": rungs, "note": note}


def _layer_nbytes(weight_format: Format | None, out_features: int, in_features: int) -> int:
    # groups of 128 do not divide such a layer, so it stays unquantized
    if weight_format is None or in_features % 128 or out_features % 32:
        return out_features * in_features * 2
    nbytes = 0
    for spec in weight_format.tensor_specs(in_features, out_features):
        if spec.optional or spec.role == "bias":
            continue
        numel = 1
        for size in spec.shape:
            numel *= size
        nbytes += numel * DTYPE_BITS[spec.dtypes[0]] // 8
    return nbytes
