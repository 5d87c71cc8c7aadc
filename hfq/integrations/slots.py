"""What in a transformers model can hold a packed layer: linear layers, Conv1D, embeddings, and the experts of a mixture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers.pytorch_utils import Conv1D

__all__ = ["PROJECTIONS", "WEIGHT", "FusedExperts", "Slot", "expert_of", "find_experts", "gate_of", "pack_weight", "slot_of"]

WEIGHT = "packed_weight"
"""The name of a packed weight within a module that keeps its own forward."""

PROJECTIONS = ("gate_proj", "up_proj", "gate_up_proj", "down_proj")
"""The layers that an expert may have in the model."""

_EXPERT = re.compile(r"^(?:(.*)\.)?experts\.(\d+)\.(\w+)$")
_PROJECTIONS = {
    "gate_proj": "gate_proj", "w1": "gate_proj", "up_proj": "up_proj", "w3": "up_proj", "down_proj": "down_proj", "w2": "down_proj",
    "gate_up_proj": "gate_up_proj",
}  # fmt: skip
"""The names that checkpoints give to the projections of an expert."""


@dataclass(frozen=True)
class Slot:
    """One place for one packed layer.

    Attributes:
        name: Its name in the model.
        kind: What is replaced; `weight` is the weight alone of a module that computes with it in its own way, as a router.
        in_features: The size of an input.
        out_features: The size of an output.
        has_bias: Whether the model has a bias there.
    """

    name: str
    kind: Literal["linear", "conv1d", "embedding", "weight", "expert"]
    in_features: int
    out_features: int
    has_bias: bool


@dataclass(frozen=True)
class FusedExperts:
    """The experts of one layer, as transformers fuses them.

    Attributes:
        name: The module's name in the model.
        module: The module.
        count: How many experts there are.
        hidden: The size of a hidden state.
        intermediate: The size of an expert's inner state.
        has_bias: Whether its projections have biases.
        is_interleaved: Whether gate and up channels alternate.
        is_halved: Whether the checkpoint's `gate_proj` and `up_proj` are halves of these all the same (`halves_experts`).
    """

    name: str
    module: nn.Module
    count: int
    hidden: int
    intermediate: int
    has_bias: bool
    is_interleaved: bool
    is_halved: bool = False

    def slot(self, expert: int, projection: str) -> Slot:
        """The place of one projection of one expert."""
        sizes = {"gate_up_proj": (self.hidden, 2 * self.intermediate), "down_proj": (self.intermediate, self.hidden)}
        in_features, out_features = sizes.get(projection, (self.hidden, self.intermediate))
        return Slot(f"{self.name}.{expert}.{projection}", "expert", in_features, out_features, self.has_bias)

    def projections(self, is_fused: bool) -> tuple[str, ...]:
        """The names of an expert's layers."""
        return ("gate_up_proj", "down_proj") if is_fused else ("gate_proj", "up_proj", "down_proj")


def slot_of(name: str, module: nn.Module | None) -> Slot | None:
    """The place that a module of the model is, or None where nothing packed can stand in for it."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return Slot(name, "linear", module.in_features, module.out_features, module.bias is not None)
    if isinstance(module, Conv1D):
        in_features, out_features = module.weight.shape
        return Slot(name, "conv1d", in_features, out_features, module.bias is not None)
    if type(module) is nn.Embedding and module.max_norm is None:
        return Slot(name, "embedding", module.embedding_dim, module.num_embeddings, False)
    parameters = module._parameters if module is not None else {}
    weight = parameters.get("weight")
    if weight is not None and weight.dim() == 2:
        return Slot(f"{name}.{WEIGHT}", "weight", weight.shape[1], weight.shape[0], False)
    return None


def pack_weight(module: nn.Module, packed: nn.Module) -> None:
    """Makes a module compute with a packed weight: reading `weight` dequantizes it."""
    cls = type(module)
    own = {
        "weight": property(lambda self: getattr(self, WEIGHT).weight),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    del module._parameters["weight"]
    module.__class__ = type(cls.__name__, (cls,), own)
    setattr(module, WEIGHT, packed)


def find_experts(submodules: Mapping[str, nn.Module]) -> dict[str, FusedExperts]:
    """Every module that fuses gated experts in the way of transformers' `use_experts_implementation`, by name."""
    found = {}
    for name, module in submodules.items():
        both, down = (module._parameters.get(local) for local in ("gate_up_proj", "down_proj"))
        if both is None or down is None or both.dim() != 3 or down.dim() != 3:
            continue
        is_plain = getattr(module, "has_gate", True) and not getattr(module, "has_post_expert_norm", False)
        if not is_plain or not callable(getattr(module, "_apply_gate", None)):
            continue
        is_transposed = bool(getattr(module, "is_transposed", False))
        hidden, intermediate = (both.shape[1], down.shape[1]) if is_transposed else (both.shape[2], down.shape[2])
        found[name] = FusedExperts(
            name, module, both.shape[0], hidden, intermediate, "gate_up_proj_bias" in module._parameters,
            not getattr(module, "is_concatenated", True),
        )  # fmt: skip
    return found


def expert_of(stored: str) -> tuple[str, int, str] | None:
    """(the path of the experts, expert, projection) of a stored module that is one projection of one expert."""
    found = _EXPERT.match(stored)
    if found is None or found[3] not in _PROJECTIONS:
        return None
    return f"{found[1]}.experts" if found[1] else "experts", int(found[2]), _PROJECTIONS[found[3]]


def gate_of(experts: FusedExperts):
    """The gating of fused experts, whose weights are dropped: it needs none."""
    experts.module._parameters.clear()
    return experts.module._apply_gate
