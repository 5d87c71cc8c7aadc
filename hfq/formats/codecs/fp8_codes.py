"""Exact conversion of FP8 codes to float32 by integer operations.

On a CPU, this is faster than the cast of torch.
"""

from __future__ import annotations

import torch

from hfq.formats.codecs.thread_buffers import thread_buffer

__all__ = ["has_nan", "scale_as_float", "widen_into"]

_CHUNK = 1 << 18
_WITHOUT_BIT_14 = ~(1 << 14)


def widen_into(panel: torch.Tensor, codes: torch.Tensor) -> None:
    """Writes codes into a panel as float32, bit-identical to `panel.copy_(codes)`.

    The bits of an e4m3 code are shifted left by seven, and the lowest copy of the sign bit is cleared. The
    result is a float16 of 1/256 of the value, also for subnormal values. An e5m2 code is the upper half of a
    float16. NaN of e4m3 would become a number, so codes that contain NaN are cast.

    Args:
        panel: float32 [rows, in_features].
        codes: [rows, in_features], float8_e4m3fn, float8_e5m2, or another dtype that torch can cast.
    """
    is_e4m3 = codes.dtype == torch.float8_e4m3fn
    if not (is_e4m3 or codes.dtype == torch.float8_e5m2) or codes.device.type != "cpu" or not codes.numel():
        panel.copy_(codes)
        return
    step = max(_CHUNK // codes.shape[1], 1)
    for start in range(0, codes.shape[0], step):
        part, target = codes[start : start + step], panel[start : start + step]
        bits = part.view(torch.int8)
        halves = thread_buffer("fp8", torch.int16, part.device, part.numel()).view(part.shape)
        if is_e4m3 and has_nan(bits, bits.view(torch.uint8)):
            target.copy_(part)
        elif is_e4m3:
            halves.copy_(bits).mul_(1 << 7).bitwise_and_(_WITHOUT_BIT_14)
            target.copy_(halves.view(torch.float16)).mul_(256)
        else:
            target.copy_(halves.copy_(bits).bitwise_left_shift_(8).view(torch.float16))


def has_nan(bits: torch.Tensor, unsigned: torch.Tensor) -> bool:
    """Returns True if any e4m3 code is NaN.

    NaN is 0x7F, the maximum of int8, or 0xFF, the maximum of the same memory as uint8.
    """
    return int(bits.amax()) == 0x7F or int(unsigned.amax()) == 0xFF


def scale_as_float(scale: torch.Tensor) -> torch.Tensor:
    """Returns the stored scale in float32 with its own shape; uint8 values are powers of two."""
    if scale.dtype == torch.float32:
        return scale
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).to(torch.float32)
