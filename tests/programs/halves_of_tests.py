"""A package of another project that adds a format to hfq by an entry point."""

from dataclasses import dataclass

import torch

from hfq.formats.base import FLOATS, Format
from hfq.tensor_spec import TensorSpec


@dataclass(frozen=True)
class Halves(Format):
    """Signed bytes in steps of 1 / 512."""

    name = "halves-of-tests"

    @classmethod
    def detect(cls, module, tensors, config):
        return cls() if "halves" in tensors else None

    def tensor_specs(self, in_features, out_features):
        return TensorSpec("halves", ("I8",), (out_features, in_features), "codes"), TensorSpec(
            "step", FLOATS, (1,), "scale"
        )

    @property
    def codes_name(self):
        return "halves"

    def shape(self, tensors):
        return tuple(tensors["halves"].shape)

    def describe(self):
        return "halves"

    def dequantize_into(self, panel, tensors, start):
        panel.copy_(tensors["halves"][start : start + panel.shape[0]]).mul_(tensors["step"])

    def quantize(self, weight):
        return {
            "halves": (weight * 512).round().clamp(-127, 127).to(torch.int8),
            "step": torch.tensor([1 / 512]),
        }
