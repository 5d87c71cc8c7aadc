"""Outlier features, injected into a small model without changing its outputs.

Large language models have a few features (input channels) whose activations are tens of times larger than the
others', and often of one sign (Dettmers et al. 2022, arXiv 2208.07339, section 4). Here, some channels of
every norm before a decoder layer's linear layers get a larger gain, and a shift if the norm has a bias. The
linear layers that read them are divided by the gain, and the shift is subtracted from their biases. This
reverses the scaling of SmoothQuant (Xiao et al. 2023, arXiv 2211.10438) and AWQ.
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
"""Norms of a decoder layer and the linear layers that read them, by model family."""


@dataclass(frozen=True)
class Outliers:
    """Size of outlier features.

    Attributes:
        gain: Factor of the channels.
        shift: Number added after the multiplication.
        channels: Number of channels per norm.
    """

    gain: float = 1.0
    shift: float = 0.0
    channels: int = 4

    def __str__(self) -> str:
        parts = [f"×{self.gain:g}"] * (self.gain != 1) + [f"+{self.shift:g}"] * (self.shift != 0)
        return " ".join(parts) or "none"


NONE = Outliers()


def with_outliers(model: Any, outliers: Outliers) -> Any:
    """Returns a copy of a model with outlier features and the same outputs.

    Args:
        model: An OPT or a Llama of transformers, in float32.
        outliers: Size of the outliers. The channels are drawn once per norm.

    Raises:
        SetupError: The model's norms have no bias to shift, or its family is not supported.
    """
    family = model.config.model_type
    if family not in _READERS or (outliers.shift and family != "opt"):
        raise SetupError(
            "Outliers cannot be injected into this model.",
            expected="an OPT, or a Llama without a shift",
            found=f"{family}, {outliers}",
            fix="Choose another model, or pass only a gain.",
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
