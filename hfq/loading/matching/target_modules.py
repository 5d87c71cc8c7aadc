"""Modules that quantized layers replace: linear layers, Conv1D, embeddings, and experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfq.formats import Format
from hfq.modules.experts import DroppedActivation
from hfq.tensor_spec import TensorInfo

__all__ = [
    "HALVES",
    "PROJECTIONS",
    "WEIGHT",
    "FusedExperts",
    "QuantizedModuleMatch",
    "TargetModule",
    "expert_of",
    "find_experts",
    "gate_of",
    "half_of",
    "halves_of",
    "pack_weight",
    "scale_of",
    "target_module_of",
]

WEIGHT = "packed_weight"
"""Name of a quantized weight in a module that keeps its own forward."""

PROJECTIONS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
"""Layers that an expert may have in the model."""

HALVES = ("gate_proj", "up_proj")
"""Layers that a checkpoint may store instead of a linear layer `gate_up_proj`."""

COMPUTES_LIKE_LINEAR = ("FalconLinear",)
"""Subclasses of `nn.Linear` whose own forward computes the same product."""

_UP_FIRST = ("Phi4MultimodalAudioMLP",)
"""Modules whose `gate_up_proj` returns the up channels first."""

_EXPERT = re.compile(r"^(?:(.*)\.)?experts\.(?:expert_)?(\d+)\.(\w+)$")
_PROJECTIONS = {
    "gate_proj": "gate_proj",
    "w1": "gate_proj",
    "up_proj": "up_proj",
    "w3": "up_proj",
    "down_proj": "down_proj",
    "w2": "down_proj",
    "gate_up_proj": "gate_up_proj",
    "wi": "up_proj",
    "wo": "down_proj",
}
"""Names of the projections of an expert in checkpoints."""


@dataclass(frozen=True)
class TargetModule:
    """Module or weight that one quantized layer replaces.

    Attributes:
        name: Its name in the model.
        kind: Kind of the target. `weight` is only the weight of a module with its own forward, such as a
            router. `half` is one of two layers that together return the outputs of one linear layer.
        in_features: Size of an input.
        out_features: Size of an output.
        has_bias: True if the model has a bias there.
    """

    name: str
    kind: Literal["linear", "conv1d", "embedding", "weight", "expert", "half"]
    in_features: int
    out_features: int
    has_bias: bool


@dataclass(frozen=True)
class QuantizedModuleMatch:
    """Layer that the checkpoint stores quantized, with its target, format, and tensors."""

    target: TargetModule
    format: Format
    infos: dict[str, TensorInfo]


@dataclass(frozen=True)
class FusedExperts:
    """Experts of one layer, fused by transformers.

    Attributes:
        name: Name of the module in the model.
        module: The module.
        count: Number of experts.
        hidden: Size of a hidden state.
        intermediate: Intermediate size of an expert.
        has_bias: True if the projections have biases.
        is_interleaved: True if gate and up channels alternate.
        is_halved: True if `gate_proj` and `up_proj` in the checkpoint are contiguous halves despite this
            (`halves_experts`).
        has_gate: True if the experts have gate channels; Nemotron-H's do not.
        is_sorted: True if each expert receives every token, weighted, and nothing is summed, as in Llama 4.
        is_masked: True if a mask routes tokens, and an expert is a module of its own, as in Switch
            Transformers.
    """

    name: str
    module: nn.Module
    count: int
    hidden: int
    intermediate: int
    has_bias: bool
    is_interleaved: bool
    is_halved: bool = False
    has_gate: bool = True
    is_sorted: bool = False
    is_masked: bool = False

    def target(self, expert: int, projection: str) -> TargetModule:
        """Returns the target of one projection of one expert."""
        sizes = {
            "gate_up_proj": (self.hidden, 2 * self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }
        in_features, out_features = sizes.get(projection, (self.hidden, self.intermediate))
        return TargetModule(
            f"{self.name}.{expert}.{projection}", "expert", in_features, out_features, self.has_bias
        )

    def projections(self, is_fused: bool) -> tuple[str, ...]:
        """Returns the names of an expert's layers."""
        if not self.has_gate:
            return ("up_proj", "down_proj")
        return ("gate_up_proj", "down_proj") if is_fused else ("gate_proj", "up_proj", "down_proj")


def target_module_of(name: str, module: nn.Module | None) -> TargetModule | None:
    """Returns the target for a module, or None if no quantized layer can replace it."""
    if isinstance(module, nn.Linear) and (
        type(module).forward is nn.Linear.forward or type(module).__name__ in COMPUTES_LIKE_LINEAR
    ):
        return TargetModule(name, "linear", module.in_features, module.out_features, module.bias is not None)
    if isinstance(module, Conv1D):
        in_features, out_features = module.weight.shape
        return TargetModule(name, "conv1d", in_features, out_features, module.bias is not None)
    is_table = type(module) is nn.Embedding or scale_of(module) is not None
    if isinstance(module, nn.Embedding) and is_table and module.max_norm is None:
        return TargetModule(name, "embedding", module.embedding_dim, module.num_embeddings, False)
    parameters = module._parameters if module is not None else {}
    weight = parameters.get("weight")
    if weight is not None and weight.dim() == 2:
        return TargetModule(f"{name}.{WEIGHT}", "weight", weight.shape[1], weight.shape[0], False)
    return None


def scale_of(module: nn.Module | None) -> float | None:
    """Returns the factor of the rows of an embedding of Gemma, or None for other modules.

    The classes with this attribute multiply in the dtype of the weight, and do nothing else (transformers
    5.17 to 5.23).
    """
    scale = getattr(module, "scalar_embed_scale", None) if isinstance(module, nn.Embedding) else None
    return float(scale) if isinstance(scale, (int, float)) else None


def half_of(name: str, module: nn.Module | None, local: str) -> TargetModule | None:
    """Returns the target for one half of a fused linear layer, or None for other modules.

    Args:
        name: Name of the fused layer in the model, ending in `.gate_up_proj`.
        module: The fused layer.
        local: The half, one of `HALVES`.
    """
    whole = target_module_of(name, module)
    if whole is None or whole.kind != "linear" or whole.out_features % 2:
        return None
    return TargetModule(f"{name}.{local}", "half", whole.in_features, whole.out_features // 2, whole.has_bias)


def halves_of(owner: nn.Module) -> tuple[str, ...]:
    """Returns the halves in the order in which the module reads their outputs."""
    return HALVES[::-1] if type(owner).__name__ in _UP_FIRST else HALVES


def pack_weight(module: nn.Module, quantized: nn.Module) -> None:
    """Replaces the weight of a module by a quantized one, which is dequantized on each read."""
    cls = type(module)
    own = {
        "weight": property(lambda self: getattr(self, WEIGHT).weight),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    del module._parameters["weight"]
    module.__class__ = type(cls.__name__, (cls,), own)
    setattr(module, WEIGHT, quantized)


def find_experts(submodules: Mapping[str, nn.Module]) -> dict[str, FusedExperts]:
    """Returns every module with fused experts, keyed by module name.

    Finds modules that use transformers' `use_experts_implementation`, and those of Llama 4 and Switch
    Transformers.
    """
    found = {name: _experts(name, module) for name, module in submodules.items()}
    return {name: experts for name, experts in found.items() if experts is not None}


def _experts(name: str, module: nn.Module) -> FusedExperts | None:
    if type(module).__name__ == "SwitchTransformersExperts":
        first = module["expert_0"].wi  # type: ignore[index]
        return FusedExperts(
            name,
            module,
            len(module),  # type: ignore[arg-type]
            first.in_features,
            first.out_features,
            has_bias=False,
            is_interleaved=False,
            has_gate=False,
            is_masked=True,
        )
    is_sorted, has_gate = type(module).__name__ == "Llama4TextExperts", getattr(module, "has_gate", True)
    first, down = (
        module._parameters.get(local) for local in ("gate_up_proj" if has_gate else "up_proj", "down_proj")
    )
    if (
        first is None
        or down is None
        or first.dim() != 3
        or down.dim() != 3
        or getattr(module, "has_post_expert_norm", False)
    ):
        return None
    if not is_sorted and not callable(getattr(module, "_apply_gate", None)):
        return None
    is_transposed = is_sorted or bool(getattr(module, "is_transposed", False))
    hidden, intermediate = (
        (first.shape[1], down.shape[1]) if is_transposed else (first.shape[2], down.shape[2])
    )
    return FusedExperts(
        name,
        module,
        first.shape[0],
        hidden,
        intermediate,
        "gate_up_proj_bias" in module._parameters,
        not getattr(module, "is_concatenated", True),
        has_gate=has_gate,
        is_sorted=is_sorted,
    )


def expert_of(stored: str) -> tuple[str, int, str] | None:
    """Returns (path of the experts, expert, projection) of a stored module.

    Returns None if the module is not one projection of one expert.
    """
    found = _EXPERT.match(stored)
    if found is None or found[3] not in _PROJECTIONS:
        return None
    return f"{found[1]}.experts" if found[1] else "experts", int(found[2]), _PROJECTIONS[found[3]]


def gate_of(experts: FusedExperts) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function between the projections of fused experts, and drops their weights."""
    experts.module._parameters.clear()
    if experts.is_masked:
        expert: Any = experts.module["expert_0"]  # type: ignore[index]
        return DroppedActivation(expert.act, expert.dropout.p)
    if not experts.has_gate:
        return experts.module.act_fn  # type: ignore[return-value]
    return partial(_gate, experts.module.act_fn) if experts.is_sorted else experts.module._apply_gate  # type: ignore


def _gate(activation: Callable[[torch.Tensor], torch.Tensor], both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return up * activation(gate)
