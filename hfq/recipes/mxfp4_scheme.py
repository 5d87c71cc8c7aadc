"""MXFP4: E2M1 codes with one power of two (E8M0) for each 32 input channels.

The exponent is that of the largest magnitude minus 2.

Format: OCP Microscaling Formats 1.0, section 6.3. Written as compressed-tensors' mxfp4-pack-quantized.
"""

from __future__ import annotations

from hfq.formats.mxfp4 import Mxfp4
from hfq.recipes.scheme import Scheme

__all__ = ["MXFP4"]

_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "dynamic": False,
    "scale_dtype": "torch.uint8",
}

MXFP4 = Scheme(
    "MXFP4 (OCP): E2M1 codes with a power of two for each 32 channels, written as compressed-tensors",
    (4,),
    False,
    (1, 32),
    lambda _: Mxfp4(),
    lambda _: {"weights": _WEIGHTS, "format": "mxfp4-pack-quantized"},
)
