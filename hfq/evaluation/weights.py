"""The weights of a loaded model, under names that do not depend on the format."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hfq.formats import Format, Unquantized
from hfq.loading.loaded_model import loader_of
from hfq.loading.matching.target_modules import WEIGHT, expert_of
from hfq.modules.flat_buffer import read_tensor
from hfq.modules.quantized_module import QuantizedModule
from hfq.tensor_spec import TensorInfo

__all__ = ["Distance", "Unit", "Weights", "digest", "distance"]

_PANEL_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Unit:
    """One weight of a model.

    Attributes:
        name: Name that its parameter has in an unquantized model, such as
            `model.layers.0.mlp.up_proj.weight`.
        infos: Stored tensors by local name. An unquantized weight has one, with an empty name.
        weight_format: Format of the weight. None if it is unquantized.
        module: Quantized module that holds it, or None.
    """

    name: str
    infos: Mapping[str, TensorInfo]
    weight_format: Format | None = None
    module: QuantizedModule | None = None

    @property
    def is_quantized(self) -> bool:
        """True if the weight is stored in a quantized format.

        An expert that the checkpoint leaves unquantized is in a quantized module, in floats.
        """
        return self.weight_format is not None and not isinstance(self.weight_format, Unquantized)

    @property
    def format_name(self) -> str:
        """Short description of the format."""
        info = next(iter(self.infos.values()))
        return (
            self.weight_format.describe()
            if self.weight_format is not None and self.is_quantized
            else f"unquantized {info.dtype}"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight: (out, in) in a quantized module."""
        if self.module is None:
            return next(iter(self.infos.values())).shape
        return self.module.out_features, self.module.in_features


class Weights:
    """The weights of a model that hfq loaded, read from memory or from the checkpoint.

    Raises:
        SetupError: hfq did not load the model.
    """

    def __init__(self, model: nn.Module) -> None:
        loading = loader_of(model)
        self._reader = loading.reader
        self.units: dict[str, Unit] = {}
        for place, module in loading.quantized.items():
            name = place.removesuffix(f".{WEIGHT}")
            infos = {local: info for local, info in module.infos.items() if local != "bias"}
            self._add(Unit(f"{name}.weight", infos, module.weight_format, module))
            if "bias" in module.infos:
                self._add(Unit(f"{name}.bias", {"": module.infos["bias"]}))
        for name, info in loading.match.unquantized.items():
            for stored in loading.match.merged.get(name, [info.name]):
                info = loading.checkpoint.tensors.get(stored, info)
                self._add(Unit(_merged_name(name, stored) or name, {"": info}))

    def tensors(self, unit: Unit) -> dict[str, torch.Tensor]:
        """Returns the unit's tensors by local name, on the CPU."""
        held = unit.module.stored_tensors() if unit.module is not None else {}
        return {
            local: held[local].cpu()
            if local in held and not held[local].is_meta
            else read_tensor(self._reader, info)
            for local, info in unit.infos.items()
        }

    def _add(self, unit: Unit) -> None:
        self.units[unit.name] = unit


def digest(tensor: torch.Tensor) -> str:
    """Returns the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


@dataclass(frozen=True)
class Distance:
    """Distance between two weights of the same shape.

    Attributes:
        is_equal: True if they are bit-identical in float32.
        max_abs: Largest absolute difference of two elements.
        relative_l2: Norm of the difference, divided by the norm of the first.
        cosine: Cosine of the angle between them. Near 0 for unrelated weights.
    """

    is_equal: bool
    max_abs: float
    relative_l2: float
    cosine: float


def distance(first: Unit, second: Unit, tensors: tuple[dict, dict]) -> Distance:
    """Returns the distance of two units of one shape, dequantized to float32 panel by panel.

    Args:
        first: A unit.
        second: Another unit.
        tensors: Tensors of the first and of the second unit.
    """
    is_transposed = [unit.module is not None and unit.module.is_transposed for unit in (first, second)]
    shape = (first if first.module is not None else second).shape
    rows = shape[0] if len(shape) > 1 else 1
    multiple = math.lcm(
        32, *(unit.weight_format.row_multiple for unit in (first, second) if unit.weight_format is not None)
    )
    step = max(_PANEL_ELEMENTS * rows // max(math.prod(shape), 1) // multiple, 1) * multiple
    is_equal, worst = True, 0.0
    squares = torch.zeros(4, dtype=torch.float64)  # |a|², |b|², |a - b|², a·b
    for start in range(0, rows, step):
        part = start, min(step, rows - start), rows
        a = _panel(first, tensors[0], part, is_transposed[1])
        b = _panel(second, tensors[1], part, is_transposed[0])
        is_equal = is_equal and torch.equal(a.view(torch.int32), b.view(torch.int32))
        a, b = a.double(), b.double()
        gap = a - b
        worst = max(worst, float(gap.abs().max()) if gap.numel() else 0.0)
        squares += torch.stack([a @ a, b @ b, gap @ gap, a @ b])
    norm_a, norm_b, norm_gap = squares[:3].sqrt().tolist()
    relative = norm_gap / norm_a if norm_a else float(norm_gap > 0)
    cosine = float(squares[3]) / (norm_a * norm_b) if norm_a and norm_b else float(norm_a == norm_b)
    return Distance(is_equal, worst, relative, cosine)


def _panel(
    unit: Unit, tensors: Mapping[str, torch.Tensor], part: tuple[int, int, int], other_is_transposed: bool
) -> torch.Tensor:
    """Returns rows [start, start + count) as a flat float32 tensor.

    `part` is (start, count, rows), with `rows` the number of all rows. Quantized and unquantized weights are
    cut at the same rows.
    """
    start, count, rows = part
    if unit.weight_format is None:
        (weight,) = tensors.values()
        weight = weight.t() if other_is_transposed and weight.dim() == 2 else weight
        return weight.reshape(rows, -1)[start : start + count].to(torch.float32).reshape(-1)
    panel = torch.empty(count, unit.shape[1], dtype=torch.float32)
    unit.weight_format.dequantize_into(panel, tensors, start)
    return panel.view(-1)


def _merged_name(name: str, stored: str) -> str | None:
    """Returns the name of an expert's projection that transformers merges."""
    found = expert_of(stored.rpartition(".")[0])
    return None if found is None else f"{name.rpartition('.')[0]}.{found[1]}.{found[2]}.weight"
