"""Outlier features, put into a small model without changing what it computes.

Large language models have a few features (input channels) whose activations are tens of times larger than the
others', and often of one sign (Dettmers et al. 2022, arXiv 2208.07339, section 4). Here some channels of
every norm before a block's linear layers get a larger gain, and a shift where the norm has a bias; the linear
layers that read them are divided by the gain, and the shift is taken out of their biases. It is SmoothQuant's
(Xiao et al. 2023, arXiv 2211.10438) and AWQ's scaling, the other way round.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from hfq.errors import SetupError

__all__ = ["NONE", "Outliers", "with_outliers"]

_READERS = {
    "opt": {
        "self_attn_layer_norm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "final_layer_norm": ("fc1",),
    },
    "llama": {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    },
}
"""By family: each norm of a block, and the linear layers that read it."""


@dataclass(frozen=True)
class Outliers:
    """How large outlier features are.

    Attributes:
        gain: What the channels are multiplied by.
        shift: What is added to them then.
        channels: How many channels of each norm.
    """

    gain: float = 1.0
    shift: float = 0.0
    channels: int = 4

    def __str__(self) -> str:
        parts = [f"×{self.gain:g}"] * (self.gain != 1) + [f"+{self.shift:g}"] * (self.shift != 0)
        return " ".join(parts) or "none"


NONE = Outliers()


def with_outliers(model: Any, outliers: Outliers) -> Any:
    """A copy of a model that computes the same, with outlier features.

    Args:
        model: An OPT or a Llama of transformers, in float32.
        outliers: Their size; which channels they are is drawn once for each norm.

    Raises:
        SetupError: The model's norms have no bias to shift, or it is of another family.
    """
    family = model.config.model_type
    if family not in _READERS or (outliers.shift and family != "opt"):
        raise SetupError(
            "Outliers cannot be put into this model.",
            expected="opt, or llama without a shift: its norms have no bias",
            found=f"{family}, {outliers}",
            fix="choose another model, or a gain alone",
        )
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for block in model.get_decoder().layers:
        for name, readers in _READERS[family].items():
            norm = block.get_submodule(name)
            channels = torch.randperm(len(norm.weight), generator=generator)[: outliers.channels]
            _inject(norm, [block.get_submodule(reader) for reader in readers], channels, outliers)
    return model


@torch.no_grad()
def _inject(norm: Any, readers: list[Any], channels: torch.Tensor, outliers: Outliers) -> None:
    norm.weight[channels] *= outliers.gain
    if outliers.shift:
        norm.bias[channels] = norm.bias[channels] * outliers.gain + outliers.shift
    elif getattr(norm, "bias", None) is not None:
        norm.bias[channels] *= outliers.gain
    for linear in readers:
        linear.weight[:, channels] /= outliers.gain
        if outliers.shift:
            linear.bias -= (linear.weight[:, channels].double().sum(1) * outliers.shift).to(linear.bias.dtype)
